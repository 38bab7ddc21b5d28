"""Whole runs by Transformer Engine, whose functions stand-ins in plain torch compute."""

from typing import Any
from warnings import catch_warnings

import pytest
import yaml
from engine_in_torch import engine, stand_ins
from tiny_models import NARROW_MIXTRAL

from mplug.model.build import build_model
from mplug_testing import run_workers
from mplug_testing.harness import difference, tiny_run, train_steps

__all__ = ["engine"]
FP8: dict[str, Any] = {"trainer.precision": "te-fp8", "kernels.linear": "te"}
HEAD = {"trainer.base_modules": ["head"]}
SWIGLU = {"model.activation": "swiglu"}
EXPERTS = {**NARROW_MIXTRAL, "kernels.experts": "te"}
wide = pytest.mark.wide("precision")
recipes = pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
"""Blockwise scaling needs widths of 128."""


def steps(settings: dict[str, Any]) -> Any:
    with stand_ins(), catch_warnings(action="ignore"):  # torch's own, as it traces
        return train_steps(settings)


@pytest.mark.wide("precision")
@pytest.mark.parametrize(
    ("recipe", "named", "model"),
    [
        ("delayed", {}, {}),
        ("tensorwise", {}, {}),
        pytest.param("delayed", {"kernels.experts": "te"}, NARROW_MIXTRAL, marks=wide),
        pytest.param("tensorwise", {"kernels.experts": "te"}, NARROW_MIXTRAL, marks=wide),
        ("delayed", {"kernels.norm_product": "te"}, {}),
        pytest.param("delayed", {"kernels.activation_product": "te"}, SWIGLU, marks=wide),
    ],
)
def test_a_run_in_fp8_stays_near_one_in_bf16_and_differs_from_it(
    recipe: str, named: dict[str, Any], model: dict[str, Any]
) -> None:
    """With fused prologues, near the run in fp8 without them."""
    is_fused = any(name.endswith("_product") for name in named)
    fp8 = {**FP8, **HEAD, **model, "precisions.te-fp8.recipe": recipe}
    found = steps({**fp8, **named})
    plain = steps(fp8 if is_fused else {**model, "trainer.precision": "bf16"})
    assert found.losses != plain.losses
    if is_fused:
        assert difference([found], plain, 0.4) == ""
    assert found.losses == pytest.approx(plain.losses, rel=0.02)
    assert found.norms == pytest.approx(plain.norms, rel=0.1)


@pytest.mark.parametrize(
    ("kind", "roles"),
    [("norm_product", {"blocks.*.attn.qkv", "blocks.*.mlp.up"}), ("activation_product", {"blocks.*.mlp.down"})],
)
def test_a_run_that_names_a_fused_slot_fills_it_in_its_blocks(kind: str, roles: set[str]) -> None:
    model = build_model(tiny_run({**FP8, **HEAD, **SWIGLU, f"kernels.{kind}": "te"}))
    filled = [one for one in model.slots if one.site.slot == f"Linear.{kind}"]
    assert {(one.site.role, one.supplier) for one in filled} == {(role, "kernels/te") for role in roles}


SAME, ROUNDED = 1e-5, 0.4
"""Maximum relative errors of gradients under a layout.

Layouts that divide no product and sum in fp32 differ only by the order of sums. Others round other bf16 numbers; then
some fp8 numbers differ by a step, which is up to an eighth of them.
"""
RECOMPUTED, COMPILED = "memory.recompute.mode=full", "trainer.compile=aot_eager"
BANDS = [
    *(({}, layout, SAME) for layout in ("dp2", "zero2", "zero2 parallel.zero.stage=2", "pp2")),
    *(({}, layout, ROUNDED) for layout in ("fsdp2", "tp2", "tp2 parallel.tp.sequence_parallel=false")),
    ({}, f"tp2 {COMPILED} {RECOMPUTED}", ROUNDED),
    *((EXPERTS, layout, SAME) for layout in ("dp2", "zero2", "pp2")),
    *((EXPERTS, layout, ROUNDED) for layout in ("ep2", "fsdp2", "tp2", f"ep2 {RECOMPUTED}", f"ep2 {COMPILED}")),
]


@wide
@recipes
@pytest.mark.parametrize(("model", "layout", "band"), BANDS)
def test_a_layout_is_within_its_band_of_one_process(
    model: dict[str, Any], layout: str, band: float, recipe: str
) -> None:
    word, *more = layout.split()
    changes = {name: yaml.safe_load(value) for name, _, value in (one.partition("=") for one in more)}
    settings = {**FP8, **model, "precisions.te-fp8.recipe": recipe}
    found, alone = run_workers(2, steps, {**settings, **changes, "parallel.layout": word}), steps(settings)
    assert difference(found, alone, band) == ""
    assert found[0].losses == pytest.approx(alone.losses, rel=1e-3)
    assert found[0].norms == pytest.approx(alone.norms, rel=2e-2)
