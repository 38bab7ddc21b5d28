"""Named sizes. A preset is a part of a run's config; the user's settings override it."""

from typing import Any

Preset = dict[str, dict[str, Any]]

PRESETS: dict[str, Preset] = {
    "tiny": {
        "model": {
            "num_layers": 4,
            "hidden_size": 128,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "ffn_hidden_size": 192,
            "vocab_size": 256,
            "rope_theta": 1e4,
            "qk_norm": True,
            "init_std": 0.06,
        },
    },
    # 8 billion parameters; a token uses 2.3 billion of them. It has the FLOPs of a dense decoder with
    # ffn_hidden_size=12800.
    "8b": {
        "model": {
            "num_layers": 24,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_kv_heads": 4,
            "ffn_hidden_size": 6400,
            "vocab_size": 32000,
        },
        "trainer": {"seq_length": 4096},
        "optimizer": {"lr": 3e-4},
    },
    # Mixtral 8x7B (arXiv 2401.04088, table 1)
    "8x7b": {
        "model": {
            "num_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_kv_heads": 8,
            "ffn_hidden_size": 14336,
            "vocab_size": 32000,
            "aux_loss_coefficient": 0.02,
        },
        "trainer": {"seq_length": 4096},
        "optimizer": {"lr": 2e-4},
    },
    # Mixtral 8x22B, as released
    "8x22b": {
        "model": {
            "num_layers": 56,
            "hidden_size": 6144,
            "num_attention_heads": 48,
            "num_kv_heads": 8,
            "ffn_hidden_size": 16384,
            "vocab_size": 32768,
            "aux_loss_coefficient": 0.02,
        },
        "trainer": {"seq_length": 4096},
        "optimizer": {"lr": 1.5e-4},
    },
    # The shape of DeepSeekMoE 16B (arXiv 2401.06066, table 7), routed as DeepSeek-V3 is (arXiv 2412.19437,
    # section 2.1.2): sigmoid scores, groups, balance by a bias and a small loss per sequence.
    "fine16b": {
        "model": {
            "num_layers": 28,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "ffn_hidden_size": 10944,
            "moe_ffn_hidden_size": 1408,
            "vocab_size": 102400,
            "rope_theta": 1e4,
            "num_dense_layers": 1,
            "num_experts": 64,
            "num_experts_per_token": 6,
            "num_shared_experts": 2,
            "moe_router_score": "sigmoid",
            "moe_router_num_groups": 8,
            "moe_router_top_groups": 4,
            "moe_router_scale": 2.5,
            "moe_balance": "sequence",
            "aux_loss_coefficient": 1e-4,
            "expert_bias_rate": 1e-3,
        },
        "trainer": {"seq_length": 4096},
        "optimizer": {"lr": 4.2e-4},
    },
}
