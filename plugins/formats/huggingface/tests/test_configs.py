"""The config.json's of published models, as their folders have them, describe the presets with their names."""

from typing import Any

import pytest

from mplug.registry.entry_points import Registry
from mplug_nn import forms_of, written_config
from mplug_nn.public_form import form_of

COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0",
    "use_cache": True,
}
GEMMA: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "cache_implementation": "hybrid",
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
QWEN: dict[str, Any] = {**COMMON, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "use_sliding_window": False}
MIXED: dict[str, Any] = {
    "attention_bias": False,
    "full_attention_interval": 4,
    "head_dim": 256,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128),
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "rms_norm_eps": 1e-06,
}
QWEN3 = {**QWEN, "attention_bias": False, "head_dim": 128, "rope_scaling": None, "sliding_window": None}
DEEPSEEK: dict[str, Any] = {
    **COMMON,
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekConfig"},
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "seq_aux": True,
    "v_head_dim": 128,
}
NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def of_class(architecture: str, kind: str) -> dict[str, Any]:
    """The fields by which a folder names its class."""
    return {"architectures": [architecture], "model_type": kind, "bos_token_id": 1, "eos_token_id": 2}


def sizes(
    *, width: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, longest: int
) -> dict[str, Any]:
    """The fields with the sizes that every class has but GPT-2."""
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": longest,
    }


def experts(number: int, chosen: int, inner: int, shared: int, scale: float) -> dict[str, Any]:
    """The fields with the sizes of DeepSeek's experts."""
    return {
        "n_routed_experts": number,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": inner,
        "n_shared_experts": shared,
        "routed_scaling_factor": scale,
    }


CONFIGS: dict[tuple[str, str], dict[str, Any]] = {
    ("gpt", "125m"): {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout"), 0.1),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), 50256),
        **dict.fromkeys(("n_ctx", "n_positions"), 1024),
        **dict.fromkeys(("n_head", "n_layer"), 12),
        **dict.fromkeys(("summary_proj_to_labels", "summary_use_proj"), True),
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "n_embd": 768,
        "summary_activation": None,
        "summary_type": "cls_index",
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
    ("llama", "2-7b"): {
        **COMMON,
        **of_class("LlamaForCausalLM", "llama"),
        **sizes(width=4096, inner=11008, layers=32, heads=32, kv_heads=32, vocabulary=32000, longest=4096),
        "pretraining_tp": 1,
        "rope_scaling": None,
    },
    ("llama", "3.1-8b"): {
        **COMMON,
        **of_class("LlamaForCausalLM", "llama"),
        **sizes(width=4096, inner=14336, layers=32, heads=32, kv_heads=8, vocabulary=128256, longest=131072),
        "attention_bias": False,
        "eos_token_id": [128001, 128008, 128009],
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_scaling": {**LLAMA3, "rope_type": "llama3"},
        "rope_theta": 500000.0,
    },
    ("mixtral", "8x7b"): {
        **COMMON,
        **of_class("MixtralForCausalLM", "mixtral"),
        **sizes(width=4096, inner=14336, layers=32, heads=32, kv_heads=8, vocabulary=32000, longest=32768),
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    },
    ("qwen", "2.5-7b"): {
        **QWEN,
        **of_class("Qwen2ForCausalLM", "qwen2"),
        **sizes(width=3584, inner=18944, layers=28, heads=28, kv_heads=4, vocabulary=152064, longest=131072),
        "max_window_layers": 28,
        "sliding_window": 131072,
        "use_mrope": False,
    },
    ("qwen", "3-8b"): {
        **QWEN3,
        **of_class("Qwen3ForCausalLM", "qwen3"),
        **sizes(width=4096, inner=12288, layers=36, heads=32, kv_heads=8, vocabulary=151936, longest=40960),
        "max_window_layers": 36,
    },
    ("qwen", "3-30b-a3b"): {
        **QWEN3,
        **of_class("Qwen3MoeForCausalLM", "qwen3_moe"),
        **sizes(width=2048, inner=6144, layers=48, heads=32, kv_heads=4, vocabulary=151936, longest=40960),
        "decoder_sparse_step": 1,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    },
    ("qwen", "next-80b-a3b"): {
        **COMMON,
        **of_class("Qwen3NextForCausalLM", "qwen3_next"),
        **sizes(width=2048, inner=5120, layers=48, heads=16, kv_heads=2, vocabulary=151936, longest=262144),
        **MIXED,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "output_router_logits": False,
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "use_sliding_window": False,
    },
    ("qwen", "3.5-27b"): {
        **COMMON,
        **of_class("Qwen3_5ForCausalLM", "qwen3_5_text"),
        **sizes(width=5120, inner=17408, layers=64, heads=24, kv_heads=4, vocabulary=248320, longest=262144),
        **MIXED,
        "linear_num_value_heads": 48,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
    },
    ("nemotron", "3-nano-30b-a3b"): {
        **{name: one for name, one in COMMON.items() if name not in ("hidden_act", "rms_norm_eps")},
        **of_class("NemotronHForCausalLM", "nemotron_h"),
        **sizes(width=2688, inner=1856, layers=52, heads=32, kv_heads=2, vocabulary=131072, longest=262144),
        **experts(128, chosen=6, inner=1856, shared=1, scale=2.5),
        **dict.fromkeys(("attention_bias", "mamba_proj_bias", "mlp_bias", "residual_in_fp32", "use_bias"), False),
        **dict.fromkeys(("moe_shared_expert_overlap", "norm_topk_prob", "rescale_prenorm_residual"), True),
        **dict.fromkeys(("use_conv_bias", "use_mamba_kernels"), True),
        **dict.fromkeys(("layer_norm_epsilon", "norm_eps"), 1e-05),
        **dict.fromkeys(("moe_latent_size", "sliding_window"), None),
        **dict.fromkeys(("n_group", "topk_group", "num_logits_to_keep", "num_nextn_predict_layers"), 1),
        "chunk_size": 128,
        "conv_kernel": 4,
        "expand": 2,
        "head_dim": 128,
        "hidden_dropout": 0.0,
        "layers_block_type": [{"M": "mamba", "E": "moe", "*": "attention"}[letter] for letter in NANO],
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 64,
        "mamba_ssm_cache_dtype": "float32",
        "mlp_hidden_act": "relu2",
        "moe_shared_expert_intermediate_size": 3712,
        "mtp_layers_block_type": ["attention", "moe"],
        "n_groups": 8,
        "pad_token_id": 0,
        "partial_rotary_factor": 1.0,
        "rope_theta": 10000,
        "ssm_state_size": 128,
        "time_step_floor": 0.0001,
        "time_step_max": 0.1,
        "time_step_min": 0.001,
    },
    ("gemma", "2-2b"): {
        **GEMMA,
        **of_class("Gemma2ForCausalLM", "gemma2"),
        **sizes(width=2304, inner=9216, layers=26, heads=8, kv_heads=4, vocabulary=256000, longest=8192),
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_act": "gelu_pytorch_tanh",
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "sliding_window_size": 4096,
    },
    ("gemma", "3-1b"): {
        **GEMMA,
        **of_class("Gemma3ForCausalLM", "gemma3_text"),
        **sizes(width=1152, inner=6912, layers=26, heads=4, kv_heads=1, vocabulary=262144, longest=32768),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    ("gpt-oss", "20b"): {
        **COMMON,
        **of_class("GptOssForCausalLM", "gpt_oss"),
        **sizes(width=2880, inner=2880, layers=24, heads=64, kv_heads=8, vocabulary=201088, longest=131072),
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "num_experts_per_tok": 4,
        "num_local_experts": 32,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "quantization_config": {"quant_method": "mxfp4"},
        "rope_scaling": {**YARN, "factor": 32.0, "rope_type": "yarn", "truncate": False},
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
    },
    ("deepseek", "v2-lite"): {
        **DEEPSEEK,
        **of_class("DeepseekV2ForCausalLM", "deepseek_v2"),
        **sizes(width=2048, inner=10944, layers=27, heads=16, kv_heads=16, vocabulary=102400, longest=163840),
        **experts(64, chosen=6, inner=1408, shared=2, scale=1.0),
        "first_k_dense_replace": 1,
        "n_group": 1,
        "norm_topk_prob": False,
        "q_lora_rank": None,
        "rope_scaling": {**YARN, "type": "yarn", "mscale": 0.707, "mscale_all_dim": 0.707},
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
    },
    ("deepseek", "v3"): {
        **DEEPSEEK,
        **of_class("DeepseekV3ForCausalLM", "deepseek_v3"),
        **sizes(width=7168, inner=18432, layers=61, heads=128, kv_heads=128, vocabulary=129280, longest=163840),
        **experts(256, chosen=8, inner=2048, shared=1, scale=2.5),
        "first_k_dense_replace": 3,
        "n_group": 8,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        "rope_scaling": {**YARN, "type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0},
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
    },
}
"""By family and preset, the config.json of the folder in which the model was published."""


@pytest.mark.parametrize(("family", "preset"), CONFIGS)
def test_the_config_of_a_published_model_describes_its_preset(family: str, preset: str) -> None:
    registry, given = Registry(), CONFIGS[family, preset]
    plugin = registry.load(registry.find("models", family))
    expected = plugin.Config(**plugin.presets[preset]["model"])
    found = form_of(forms_of(plugin), given).read(given)
    choices = {name: getattr(expected, name) for name in found.free}
    assert plugin.Config(**{**found.altering, **choices, **found.fixed}).computes_like(expected)
    assert written_config(plugin, expected)["architectures"] == given["architectures"]
