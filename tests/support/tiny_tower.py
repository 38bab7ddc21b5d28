"""Settings of a tiny run of a model that sees, with pictures of noise."""

from typing import Any

SEEING: dict[str, Any] = {
    "model.name": "qwen-vl",
    "model.head_dim": 8,
    "model.rope_division": "alternating",
    "model.rope_sections": [2, 1, 1],
    "model.vision": {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "ffn_hidden_size": 24,
        "patch_size": 4,
        "position_grid": None,
        "deepstack_blocks": [],
        "image_token": 250,
        "video_token": 251,
        "start_token": 252,
        "end_token": 253,
        "min_pixels": 64,
        "max_pixels": 400,
        "typical_patches": 24,
    },
    "data.media": 3,
    "data.media_sides": [8, 24],
    "trainer.seq_length": 32,
}
