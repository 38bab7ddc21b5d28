"""Settings of a tiny run of Qwen-VL, and of its towers."""

from typing import Any

QWEN_VL: dict[str, Any] = {
    "model.name": "qwen-vl",
    "model.hidden_size": 32,
    "model.num_layers": 3,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.ffn_hidden_size": 48,
    "model.vocab_size": 260,
    "model.rope_division": "alternating",
    "model.rope_sections": [2, 1, 1],
}
TOWER: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "ffn_hidden_size": 24,
    "patch_size": 4,
    "position_grid": 6,
    "deepstack_blocks": [0, 1],
    "image_token": 256,
    "video_token": 257,
    "start_token": 258,
    "end_token": 259,
    "min_pixels": 64,
    "max_pixels": 400,
}
WINDOWS = {
    "position_grid": None,
    "deepstack_blocks": [],
    "window_size": 16,
    "full_attention_blocks": [1],
    "tokens_per_second": 2,
}
"""What the tower of Qwen2.5-VL has instead."""
