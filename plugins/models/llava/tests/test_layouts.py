"""LLaVA computes the same under every layout: losses, gradients, norms and weights are those of one process.

Micro batches hold 0 to 3 pictures a sample. Some micro batches have none.
"""

from typing import Any

import pytest
from layout_words import COMPILING

from mplug import RETURNS
from mplug.training.assembly import build
from mplug_testing import run_workers
from mplug_testing.harness import tiny_run
from mplug_testing.parity import require_parity

DECODER: dict[str, Any] = {
    "name": "llama",
    "hidden_size": 32,
    "num_layers": 3,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 48,
    "vocab_size": 260,
}
TINY: dict[str, Any] = {
    "model.name": "llava",
    "model.decoder": DECODER,
    "model.vision": {
        "num_layers": 3,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "ffn_hidden_size": 24,
        "image_size": 12,
        "patch_size": 4,
    },
    "model.image_token": 256,
    "data.media": 3,
    "data.media_sides": [8, 24],
    "trainer.seq_length": 32,
}
SIGLIP = {
    "model.vision": {
        **TINY["model.vision"],
        "class_row": False,
        "patch_bias": True,
        "norm_before": False,
        "pooling_head": True,
        "feature_layer": -1,
    },
    "model.decoder": {**DECODER, "name": "qwen"},
}
TILED = {
    "model.vision": {**SIGLIP["model.vision"], "fit": "stretch"},
    "model.decoder": SIGLIP["model.decoder"],
    "model.tiling": {
        "resolutions": [[12, 12], [12, 24], [24, 12], [24, 24]],
        "max_tiles": 2,
        "video_token": 257,
    },
    "trainer.seq_length": 48,
}
"""LLaVA-OneVision: single pictures of 2 to 5 tiles, of which the largest are resampled, and several pictures."""
PACKED = {"data.documents": 3}
BY_DOCUMENTS = {"parallel.cp.method": "all_gather", "parallel.cp.divide": "documents", "parallel.cp.equal_length": 16}
TIED = {"model.decoder": {**DECODER, "tie_embeddings": True}}
FROZEN = {"model.frozen": ["tower.patches", "tower.blocks", "decoder"]}
"""Only the projector is trained, as in the first stage of LLaVA."""
EXPERTS = {"model.decoder": {**DECODER, "name": "qwen", "num_experts": 4, "moe_ffn_hidden_size": 16}}
ADAPTED = {"adapters.lora.rank": 2, "model.frozen": ["tower"]}
BALANCED = {"parallel.balance": True}
JOINED = {"model.frozen": ["tower", "decoder"]}
"""Only the ends of lines are trained."""
WIDE = pytest.mark.wide("layouts")
TILED_LAYOUTS = (
    *("tp2", "pp2", "pp2 parallel.pp.schedule=zb-h1", "cp2", "cp2 parallel.cp.method=ulysses", "zero2", "fsdp2", "dp2"),
    *("tp2pp2", "fsdp2tp2", "dp2cp2", "tp2 trainer.compile=aot_eager", "fsdp2 memory.recompute.mode=full"),
)
CASES = [
    pytest.param("tp2pp2", TIED, id="tp2pp2 tied"),
    pytest.param("cp2", PACKED, id="cp2 packed", marks=WIDE),
    pytest.param("fsdp2", SIGLIP, id="fsdp2 siglip", marks=WIDE),
    pytest.param("tp2pp2", SIGLIP, id="tp2pp2 siglip", marks=WIDE),
    pytest.param("fsdp2", FROZEN, id="fsdp2 projector alone"),
    pytest.param("tp2", {}, id="tp2", marks=WIDE),
    pytest.param("pp2", {}, id="pp2", marks=WIDE),
    pytest.param("pp2 parallel.pp.schedule=zb-h1", {}, id="pp2 zb-h1", marks=WIDE),
    pytest.param("cp2", {}, id="cp2", marks=WIDE),
    pytest.param("zero2", {}, id="zero2", marks=WIDE),
    pytest.param("dp2", {}, id="dp2", marks=WIDE),
    pytest.param("fsdp2", {}, id="fsdp2", marks=WIDE),
    pytest.param("fsdp2tp2", {}, id="fsdp2tp2", marks=WIDE),
    pytest.param("dp2cp2", {}, id="dp2cp2", marks=WIDE),
    pytest.param("ep2", EXPERTS, id="ep2 experts of the decoder", marks=WIDE),
    pytest.param("tp2", ADAPTED, id="tp2 lora", marks=WIDE),
    pytest.param("tp2 trainer.compile=aot_eager", {}, id="tp2 compiled", marks=WIDE),
    pytest.param("tp2", TILED, id="tp2 tiled"),
    pytest.param("dp2cp2", {**TILED, **PACKED, **BALANCED}, id="dp2cp2 tiled, packed and balanced"),
    *(pytest.param(layout, TILED, id=f"{layout} tiled", marks=WIDE) for layout in TILED_LAYOUTS[1:]),
    pytest.param("dp2cp2", {**TILED, **BALANCED}, id="dp2cp2 tiled and balanced", marks=WIDE),
    pytest.param("cp2", {**TILED, **PACKED}, id="cp2 tiled and packed", marks=WIDE),
    pytest.param("cp2", {**TILED, **PACKED, **BY_DOCUMENTS}, id="cp2 tiled documents", marks=WIDE),
    pytest.param("fsdp2", {**TILED, **JOINED}, id="fsdp2 ends of lines alone", marks=WIDE),
    pytest.param("dp2", {**TILED, "model.frozen": ["tower"]}, id="dp2 tiled, frozen tower", marks=WIDE),
    pytest.param("tp2", {**TILED, **ADAPTED}, id="tp2 tiled, lora", marks=WIDE),
    pytest.param(
        "ep2", {**TILED, "model.decoder": EXPERTS["model.decoder"]}, id="ep2 tiled, experts of the decoder", marks=WIDE
    ),
]


@pytest.mark.wide("families")
@COMPILING
@pytest.mark.parametrize(("layout", "settings"), CASES)
def test_a_layout_computes_what_one_process_does(layout: str, settings: dict[str, Any]) -> None:
    require_parity({**TINY, **settings}, layout)


def bytes_of_entries(settings: dict[str, Any]) -> dict[str, int]:
    """Be one stage: the memory of each entry of a micro batch that it receives."""
    batch = next(build(tiny_run(settings)).train_loader.take(8))
    return {name: x.untyped_storage().nbytes() for name, x in batch.items() if name != RETURNS}


@pytest.mark.parametrize("balance", [False, pytest.param(True, marks=WIDE)])
def test_a_stage_without_the_tower_receives_no_rows_of_pictures(balance: bool) -> None:
    layout = "pp2dp2" if balance else "pp2"
    split = {"parallel.layout": layout, "parallel.balance": balance, "parallel.pp.split": [6, 4]}
    ranks = run_workers(4 if balance else 2, bytes_of_entries, {**TINY, **split})
    for name, least in {"patches": 1000, "patch_places": 100, "patch_lengths": 16}.items():
        assert ranks[0][name] >= least, name
        assert ranks[-1][name] <= 8, name
    assert ranks[0]["labels"] == ranks[-1]["labels"]
