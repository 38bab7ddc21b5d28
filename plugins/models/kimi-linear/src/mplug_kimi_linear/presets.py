"""The published sizes. A preset is a part of a run's config; the user's settings override it."""

from typing import Any

Preset = dict[str, dict[str, Any]]

DELTA, FULL = ["kimi_delta"], ["attention"]
PRESETS: dict[str, Preset] = {
    # everything else is a default; the last block has attention, although it is not a fourth one
    "48b-a3b": {
        "model": {"mixer_types": [*(DELTA * 3 + FULL) * 6, *DELTA * 2, *FULL]},
        "trainer": {"seq_length": 4096},
        "optimizer": {"lr": 3e-4},
    },
}
