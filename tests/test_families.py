"""What no generated config has: blocks without rotary positions, and multi-token prediction with its paper's loss."""

import importlib
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from library_models import S, V, block, built, decoder, difference, drawn, summed_loss, wide
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
NAMES = {
    "num_hidden_layers": "num_layers",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "ffn_hidden_size",
}
OURS = {NAMES.get(name, name): size for name, size in list(SHAPE.items())[:6]}


def library(kind: str, **fields: Any) -> torch.nn.Module:
    """The library's model of a kind ('llama'), with random weights."""
    config = AutoConfig.for_model(kind, **{**SHAPE, **fields})
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    return model


def test_llama_without_rotary_positions_in_selected_blocks_is_the_librarys_model() -> None:
    theirs = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "no_rope_layers": [1, 0, 1],
        "tie_word_embeddings": False,
    }
    ours = {"rope_theta": 1e4, "norm_eps": 1e-6, "position_types": ("rotary", "none")}
    importlib.import_module("transformers.models.smollm3.modeling_smollm3")
    with wide("smollm3"):
        reference = drawn(library("smollm3", **theirs))
        assert difference(reference, built("llama", {**OURS, **ours}), decoder) < TOLERANCE


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
    "aux_loss_coefficient": 0.0,
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
