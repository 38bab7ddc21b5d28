"""Every family gives the logits and all gradients of the transformers library's model of the same weights."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from library_models import S, V, block, built, decoder, difference, drawn, gpt2, summed_loss, wide
from transformers import AutoConfig, AutoModelForCausalLM

TOLERANCE = 1e-10
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": V,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
OURS: dict[str, Any] = {
    "hidden_size": 32,
    "num_layers": 3,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 40,
    "vocab_size": V,
}


def library(kind: str, **fields: Any) -> torch.nn.Module:
    """The library's model of a kind ('llama'), with random weights."""
    config = AutoConfig.for_model(kind, **{**SHAPE, **fields})
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    return model


def plain(theta: float) -> dict[str, Any]:
    """Rotary positions without scaling, in the library's config."""
    return {"rope_type": "default", "rope_theta": theta}


def near(
    kind: str,
    theirs: dict[str, Any],
    family: str,
    ours: dict[str, Any],
    prepare: Callable[[torch.nn.Module], None] = lambda _: None,
) -> None:
    """Assert that a family's model is the library's, which `prepare` may change before."""
    module = kind.removesuffix("_text")
    importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    with wide(module):
        reference = drawn(library(kind, **theirs))
        prepare(reference)
        assert difference(reference, built(family, {**OURS, **ours}), decoder) < TOLERANCE


GELU = "gelu_pytorch_tanh"
NO_LOSS = {"aux_loss_coefficient": 0.0}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


def test_llama_2_is_the_librarys_model() -> None:
    near("llama", {"rope_parameters": plain(1e4)}, "llama", {"rope_theta": 1e4, "norm_eps": 1e-6})


def test_llama_3_with_scaled_frequencies_is_the_librarys_model() -> None:
    scaling = {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}
    theirs = {"rope_parameters": scaling, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "head_dim": 16}
    ours = {"rope_scaling": {"type": "llama3", **LLAMA3}, "rope_theta": 500.0, "tie_embeddings": True, "head_dim": 16}
    near("llama", theirs, "llama", ours)


def test_llama_with_all_biases_is_the_librarys_model() -> None:
    theirs = {"rope_parameters": plain(5e5), "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5}
    near("llama", theirs, "llama", {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True})


def test_llama_without_rotary_positions_in_selected_blocks_is_the_librarys_model() -> None:
    theirs = {"rope_parameters": plain(1e4), "no_rope_layers": [1, 0, 1], "tie_word_embeddings": False}
    near("smollm3", theirs, "llama", {"rope_theta": 1e4, "norm_eps": 1e-6, "position_types": ("rotary", "none")})


def test_mixtral_is_the_librarys_model() -> None:
    theirs = {"rope_parameters": plain(1e6), "rms_norm_eps": 1e-5, "num_local_experts": 4, "num_experts_per_tok": 2}
    near("mixtral", {**theirs, "router_jitter_noise": 0.0}, "mixtral", {"num_experts": 4, **NO_LOSS})


def test_gpt_2_is_the_librarys_model() -> None:
    importlib.import_module("transformers.models.gpt2.modeling_gpt2")
    own = {**OURS, "num_kv_heads": None, "position": "learned", "max_position_embeddings": 64, "bias": True}
    with wide("gpt2"):
        config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=3, n_head=4, n_inner=40, n_positions=64, vocab_size=V)
        for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
            setattr(config, name, 0.0)
        theirs = drawn(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
        ours = built("gpt", {**own, "activation": "gelu_tanh", "tie_embeddings": True})
        assert difference(theirs, ours, gpt2) < TOLERANCE


def test_qwen_2_is_the_librarys_model() -> None:
    theirs = {"rope_parameters": plain(1e6), "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
    near("qwen2", theirs, "qwen", {"qkv_bias": True, "qk_norm": False, "tie_embeddings": True})


def test_qwen_3_is_the_librarys_model() -> None:
    theirs = {"rope_parameters": plain(1e6), "rms_norm_eps": 1e-6, "head_dim": 16}
    near("qwen3", theirs, "qwen", {"head_dim": 16})


QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}


def test_qwen_3_with_experts_in_every_second_block_is_the_librarys_model() -> None:
    theirs = {**QWEN_EXPERTS, "rope_parameters": plain(1e6), "head_dim": 16, "decoder_sparse_step": 2}
    ours = {"num_experts": 6, "moe_ffn_hidden_size": 12, "head_dim": 16, "feed_forward_types": ("mlp", "experts")}
    near("qwen3_moe", theirs, "qwen", {**ours, **NO_LOSS})


# The library keeps the square root of hidden_size in fp32, so it is an integer here.
GEMMA = {"hidden_size": 16, "head_dim": 16, "tie_word_embeddings": True, "sliding_window": 4}
WINDOWS = {"head_dim": 16, "window": 4}
OF_GEMMA = {**WINDOWS, "hidden_size": 16}


def test_gemma_2_with_windows_and_soft_caps_is_the_librarys_model() -> None:
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 24}
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    theirs = {**GEMMA, **caps, "layer_types": types, "rope_parameters": plain(1e4), "hidden_activation": GELU}
    ours = {**OF_GEMMA, "attention_soft_cap": 2.0, "logit_soft_cap": 3.0, "attention_scale": 24**-0.5}
    near("gemma2", theirs, "gemma", {**ours, "attention_types": ("window", "full")})


def test_gemma_3_with_two_bases_of_rotary_positions_is_the_librarys_model() -> None:
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    bases = {
        "sliding_attention": plain(1e2),
        "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    }
    theirs = {**GEMMA, "layer_types": types, "rope_parameters": bases, "query_pre_attn_scalar": 24}
    scaling = {"type": "linear", "factor": 8.0}
    ours = {**OF_GEMMA, "qk_norm": True, "attention_scale": 24**-0.5, "rope_scaling": scaling, "rope_theta": 1e4}
    types = ("window", "window", "full")
    near("gemma3_text", theirs, "gemma", {**ours, "window_rope_theta": 1e2, "attention_types": types})


def test_gpt_oss_with_sinks_and_windows_is_the_librarys_model() -> None:
    yarn = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    yarn["original_max_position_embeddings"] = 16
    experts = {"num_local_experts": 6, "num_experts_per_tok": 2}
    theirs = {**experts, "head_dim": 16, "sliding_window": 4, "rms_norm_eps": 1e-5, "num_hidden_layers": 2}
    theirs["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 150.0, **yarn}
    ours = {**WINDOWS, "num_layers": 2, "rope_scaling": {"type": "yarn", **yarn}, "rope_theta": 150.0}
    near("gpt_oss", theirs, "gpt-oss", {**ours, "num_experts": 6, "num_experts_per_token": 2, **NO_LOSS})


EXPERTS_OF_V2 = {
    "num_kv_heads": None,
    "num_dense_layers": 1,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 2,
    "moe_ffn_hidden_size": 12,
    "moe_router_score": "softmax",
    "moe_router_normalize": False,
    "moe_router_num_groups": 4,
    "moe_router_top_groups": 2,
    "moe_router_group_best": 1,
    "moe_router_scale": 1.5,
    "expert_bias_rate": 0.0,
    **NO_LOSS,
}
MLA = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.9}


THEIR_V3 = {
    **MLA,
    "q_lora_rank": 10,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "num_mtp_layers": 0,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, **YARN},
}
OUR_V3 = {
    **MLA,
    **NO_LOSS,
    "q_lora_rank": 10,
    "num_kv_heads": None,
    "num_dense_layers": 1,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "moe_ffn_hidden_size": 12,
    "moe_router_num_groups": 4,
    "moe_router_top_groups": 2,
    "moe_router_scale": 1.5,
    "rope_theta": 100.0,
    "rope_scaling": {"type": "yarn", **YARN},
}


@pytest.mark.parametrize("rank", [None, 10])
def test_deepseek_v2_with_groups_of_experts_is_the_librarys_model(rank: int | None) -> None:
    theirs = {**MLA, "q_lora_rank": rank, "num_key_value_heads": 4, "first_k_dense_replace": 1}
    theirs |= {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "moe_intermediate_size": 12}
    theirs |= {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
    theirs["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 100.0, **YARN}
    ours = {**MLA, **EXPERTS_OF_V2, "q_lora_rank": rank, "rope_theta": 100.0, "rope_scaling": {"type": "yarn", **YARN}}
    near("deepseek_v2", theirs, "deepseek", ours)


def test_deepseek_v3_with_biases_for_the_choice_is_the_librarys_model() -> None:
    def bias(model: torch.nn.Module) -> None:
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.linspace(-1, 1, len(buffer)).roll(3))

    near("deepseek_v3", THEIR_V3, "deepseek", OUR_V3, bias)


class Ahead(torch.nn.Module):
    """The library's V3 with its layers of multi-token prediction, and the loss of arXiv 2412.19437, section 2.2."""

    def __init__(self, num_depths: int) -> None:
        super().__init__()
        from transformers.modeling_layers import MtpLayer
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

        self.main: Any = library("deepseek_v3", **THEIR_V3)
        config = AutoConfig.for_model("deepseek_v3", **{**SHAPE, **THEIR_V3, "first_k_dense_replace": 0})
        config._attn_implementation = config._experts_implementation = "eager"
        depths = (MtpLayer(config, v3.DeepseekV3DecoderLayer, v3.DeepseekV3RMSNorm, 0) for _ in range(num_depths))
        self.depths = torch.nn.ModuleList(depths)

    def losses(self, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, labels = given["tokens"], given["labels"]
        hidden = self.main.model(tokens, use_cache=False).last_hidden_state
        logits, turns = self.main.lm_head(hidden), self.main.model.rotary_emb(hidden, given["positions"])
        loss, mask = summed_loss(logits, labels), torch.full((S, S), float("-inf"), dtype=torch.float64).triu(1)
        for number, depth in enumerate(self.depths, start=1):
            ahead = self.main.model.embed_tokens(torch.nn.functional.pad(tokens[:, number:], (0, number)))
            hidden = depth(ahead, hidden, turns, mask[None, None], given["positions"], None)
            targets = torch.nn.functional.pad(labels[:, number:], (0, number), value=-100)
            loss = loss + 0.3 / len(self.depths) * summed_loss(self.main.lm_head(hidden), targets)
        return logits, loss


def with_depths(theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters of `Ahead` as ours."""
    found = decoder({name.removeprefix("main."): x for name, x in theirs.items() if name.startswith("main.")})
    names = {"enorm": "token_norm", "hnorm": "hidden_norm", "eh_proj": "merge", "post_norm": "norm"}
    for number in range(2):
        own = {f"block.{name}": x for name, x in block(theirs, f"depths.{number}.mtp_block.").items()}
        own |= {f"{b}.weight": theirs[f"depths.{number}.{a}.weight"] for a, b in names.items()}
        found |= {f"ahead.depths.{number}.{name}": x for name, x in own.items()}
    return found


def test_two_depths_of_multi_token_prediction_have_the_gradients_of_the_papers_loss() -> None:
    importlib.import_module("transformers.models.deepseek_v3.modeling_deepseek_v3")
    with wide("deepseek_v3"):
        model = built("deepseek", {**OURS, **OUR_V3, "num_mtp_layers": 2})
        assert difference(drawn(Ahead(2)), model, with_depths, lambda own, given: own.losses(given)) < TOLERANCE
