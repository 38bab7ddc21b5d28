"""The example in docs/architecture.md is what the code computes."""

from pathlib import Path
from typing import Any

import pytest

from mplug import (
    Axis,
    Box,
    Bucket,
    GatheredPlacement,
    Init,
    Mesh,
    Parameter,
    Placement,
    Segment,
    Sharding,
    contiguous,
)
from mplug.layout.ranks import Grouping

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
MESH = Mesh.of(
    [
        Axis("pp", 2, activations=("units",), distance=100, views=("dense", "sparse")),
        Axis("dp", 2, entries={"batch": contiguous}, distance=20),
        Axis("tp", 4, splits=("heads", "kv_heads", "vocab"), activations=("sequence",)),
        Axis("ep", 2, splits=("expert",), views=("sparse",)),
    ],
    16,
)
INIT = Init("normal", std=0.02)
HEADS, KV_HEADS = Segment("heads", 8, 64), Segment("kv_heads", 2, 64, "copy")
VOCABULARY = Parameter((Segment("vocab", 10, uneven="pad"), "embed"), INIT, over=("batch", "sequence", "units"))
FIRST: dict[str, Any] = {"stage_axis": "pp", "stages": (0,)}
TIED: dict[str, Any] = {"stage_axis": "pp", "stages": (0, 1)}
QKV = Placement("qkv", Parameter(((HEADS, KV_HEADS, KV_HEADS), "embed"), INIT), (768, 512), MESH, **FIRST)
OUTPUT = Placement("output", Parameter(("embed", HEADS), INIT), (512, 512), MESH, **FIRST)
BUCKET = Bucket(("norm", "output"), (0, 512), (512, 512 * 128), 512 * 129, ("dp",), num_owners=2)
EXAMPLE: dict[str, tuple[Placement, int]] = {
    "QKV, 8 query heads of width 64": (QKV, 0),
    "QKV, keys of 2 KV heads": (QKV, 1),
    "vocabulary of 10, padded, tied on both stages": (Placement("v", VOCABULARY, (10, 512), MESH, **TIED), 0),
    "norm": (Placement("norm", Parameter(("embed",), INIT), (512,), MESH, **FIRST), 0),
    "4 experts": (Placement("experts", Parameter(("expert", "mlp", "embed"), INIT), (4, 6, 8), MESH, **FIRST), 0),
    "attention output, no sharding at rest": (OUTPUT, 0),
    "the same, rows sharded by fsdp along dp": (GatheredPlacement.of(OUTPUT, "dp"), 0),
    "the same, a ZeRO bucket's range along dp": (Sharding((BUCKET,)).placed(OUTPUT), 0),
}


@pytest.mark.parametrize("name", EXAMPLE)
def test_a_row_of_the_example_is_what_the_code_computes(name: str) -> None:
    placement, number = EXAMPLE[name]
    facts = getattr(placement, "whole", placement)
    region, box = facts.regions[number], placement.boxes(5)[number]
    cuts = [
        f"{c.axis}: each {c.each}" + (f", copies {c.copies}" if c.copies > 1 else "") for c in region.cuts if c.axis
    ]
    apart = [f"apart: {axis}" for axis in facts.apart]
    cells = [
        name,
        "; ".join([*cuts, *apart]) or "none",
        spans(region.copies),
        spans(region.partial),
        f"{'experts' if 'experts' in name else 'rows'} {box.start[0]} to {box.start[0] + box.shape[0] - 1}",
        listed(box, "copies"),
        listed(box, "partial"),
    ]
    assert f"| {' | '.join(cells)} |" in PAGE.read_text()


def spans(grouping: Grouping) -> str:
    return ", ".join(f"{axis} {one}" for axis, one in zip(grouping.axes, grouping.together, strict=True))


def listed(box: Box, which: str) -> str:
    ranks = [*getattr(box, which)]
    return f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 4 else ", ".join(map(str, ranks))


def test_the_page_has_no_other_rows() -> None:
    table = PAGE.read_text().partition("| copies on ranks |")[2].partition("\n\n")[0].splitlines()[2:]
    assert [line.split(" | ")[0].removeprefix("| ") for line in table] == list(EXAMPLE)
