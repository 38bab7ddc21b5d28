"""Gemma 3 with images computes the same under every layout: losses, gradients, norms and weights of one process.

Micro batches hold 0 to 3 pictures a sample. Some micro batches have none. An image has more tokens than a window.
"""

from typing import Any

import pytest
from layout_words import COMPILING

from mplug_testing import Fault
from mplug_testing.parity import require_parity

TINY: dict[str, Any] = {
    "model.name": "gemma",
    "model.hidden_size": 32,
    "model.num_layers": 3,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.ffn_hidden_size": 48,
    "model.vocab_size": 260,
    "model.qk_norm": True,
    "model.window": 3,
    "model.attention_types": ["window", "full"],
    "model.window_rope_theta": 100.0,
    "model.vision": {
        "num_layers": 3,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "ffn_hidden_size": 24,
        "image_size": 16,
        "patch_size": 4,
        "tokens_per_image": 4,
        "image_token": 256,
        "start_token": 258,
        "end_token": 259,
        "blank_line_token": 10,
    },
    "data.media": 3,
    "data.media_sides": [8, 24],
    "trainer.seq_length": 32,
}
PACKED = {"data.documents": 3}
FROZEN_TOWER = {"model.frozen": ["tower"]}
FROZEN_DECODER = {"model.frozen": ["embedding", "blocks", "head"]}
COMPILED = {"trainer.compile": "aot_eager"}
ULYSSES = "parallel.cp.method=ulysses"
WIDE = pytest.mark.wide("layouts")
CASES = [
    pytest.param("tp2pp2", PACKED, id="tp2pp2 packed"),
    pytest.param("cp2", PACKED, id="cp2 ring packed"),
    pytest.param(f"cp2 {ULYSSES}", {}, id="cp2 ulysses", marks=WIDE),
    pytest.param("fsdp2", FROZEN_TOWER, id="fsdp2 frozen tower"),
    pytest.param("dp2", {}, id="dp2", marks=WIDE),
    pytest.param("zero2", {}, id="zero2", marks=WIDE),
    pytest.param("fsdp2", {}, id="fsdp2", marks=WIDE),
    pytest.param("tp2", {}, id="tp2", marks=WIDE),
    pytest.param("tp2", {**COMPILED, **PACKED}, id="tp2 compiled packed", marks=WIDE),
    pytest.param("tp2 parallel.tp.sequence_parallel=false", {}, id="tp2 whole sequences", marks=WIDE),
    pytest.param("tp2", FROZEN_DECODER, id="tp2 frozen decoder", marks=WIDE),
    pytest.param("pp2", {}, id="pp2", marks=WIDE),
    pytest.param("pp2 parallel.pp.schedule=zb-h1", {}, id="pp2 zb-h1", marks=WIDE),
    pytest.param("pp2", FROZEN_DECODER, id="pp2 frozen decoder", marks=WIDE),
    pytest.param("pp2", COMPILED, id="pp2 compiled", marks=WIDE),
    pytest.param(f"cp2 {ULYSSES}", PACKED, id="cp2 ulysses packed", marks=WIDE),
    pytest.param(f"cp2 {ULYSSES}", COMPILED, id="cp2 ulysses compiled", marks=WIDE),
    pytest.param(f"cp2 {ULYSSES}", {"kernels.attention": "flex", **PACKED}, id="cp2 ulysses flex packed", marks=WIDE),
    pytest.param("cp2", {}, id="cp2 ring", marks=WIDE),
    pytest.param("cp2", COMPILED, id="cp2 ring compiled", marks=WIDE),
    pytest.param("cp2", {"kernels.attention": "flex", **PACKED}, id="cp2 ring flex packed", marks=WIDE),
    pytest.param("cp2 parallel.cp.method=all_gather", PACKED, id="cp2 all_gather packed", marks=WIDE),
    pytest.param("cp4", {}, id="cp4 ring", marks=WIDE),
    pytest.param(
        "cp4 parallel.cp.method=hierarchical parallel.cp.ulysses_degree=2", PACKED, id="cp4 hierarchical", marks=WIDE
    ),
    pytest.param("cp2pp2", PACKED, id="cp2pp2 ring packed", marks=WIDE),
    pytest.param("cp2tp2", {}, id="cp2tp2 ring", marks=WIDE),
    pytest.param("dp2cp2", {}, id="dp2cp2 ring", marks=WIDE),
    pytest.param("dp2cp2 parallel.balance=true", {}, id="dp2cp2 ring balanced", marks=WIDE),
    pytest.param(f"cp2tp2 {ULYSSES}", {}, id="cp2tp2 ulysses", marks=WIDE),
    pytest.param(f"dp2cp2 {ULYSSES}", {}, id="dp2cp2 ulysses", marks=WIDE),
    pytest.param("fsdp2tp2", {}, id="fsdp2tp2", marks=WIDE),
]


@pytest.mark.wide("families")
@COMPILING
@pytest.mark.parametrize(("layout", "settings"), CASES)
def test_a_layout_computes_what_one_process_does(layout: str, settings: dict[str, Any]) -> None:
    require_parity({**TINY, **settings}, layout)


def test_attention_by_parts_refuses_soft_caps() -> None:
    with pytest.raises(Fault, match=r"does not support soft cap; set parallel\.cp\.method=ulysses"):
        require_parity({**TINY, "model.attention_soft_cap": 2.0, "kernels.attention": None}, "cp2")
