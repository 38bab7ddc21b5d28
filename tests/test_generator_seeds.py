"""What kernels draw by themselves: masks of fused dropout, seen where the default kernel computes them.

`pytest --wide layouts` compares them under every layout of docs/layouts.md.
"""

import warnings
from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mplug import Axis, UsageError
from mplug.layout.mesh import Mesh, contiguous
from mplug.layout.plan import Plan, Unit
from mplug.model.build import build_model
from mplug.registry.entry_points import Registry
from mplug.training.assembly import build
from mplug.training.evaluator import ENTRY, micro_batch_key
from mplug_steps.generator_seeds import GeneratorSeeds, place_of
from mplug_testing import run_workers
from mplug_testing.draws import draws_fault
from mplug_testing.harness import STEPS, Trace, in_fp64, tiny_run, train_steps
from mplug_testing.unit_calls import Call, watch_units

DROPS = {"model.attention_dropout": 0.2}
RECOMPUTES = {"memory.recompute.mode": "full"}
EXPERTS = {"model.name": "mixtral", "model.num_layers": 2, "model.num_experts": 4}
WIDE = pytest.mark.wide("layouts")
MICRO_BATCHES, BLOCKS = 4, 4
"""Of a step of the tiny run in one process, and of its model."""


# Masks.

Mask = tuple[bool, ...]


@dataclass
class Masks:
    """The masks that a rank's blocks drop by: of each call in training, and of what backward runs again."""

    forward: dict[Call, Mask] = field(default_factory=dict)
    again: Counter[Mask] = field(default_factory=Counter)


def leave_out(missing: str) -> None:
    """Seed the generators of this process without one of the numbers that the seed depends on."""
    original = GeneratorSeeds.begin

    def begin(self: GeneratorSeeds, unit: Unit, key: int) -> None:
        if missing == "unit":
            self.places = dict.fromkeys(["unit", *self.places], self.places[unit.name])
            unit = Unit("unit", unit.inputs, unit.outputs)
        if missing == "place":
            self.places = dict.fromkeys(self.places, 0)
        original(self, unit, 0 if missing == "micro batch" else key)

    GeneratorSeeds.begin = begin  # type: ignore[method-assign]


def masks(settings: dict[str, Any], missing: str = "") -> Masks:
    """Be one rank of a run of `STEPS` steps, in which the default kernel shows what it drops."""
    import mplug_sdpa.attention as kernel

    found, calls = Masks(), list[Call]()
    plain = kernel.scaled_dot_product_attention

    def shown(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Tensor:
        if named["dropout_p"]:
            state, length = torch.get_rng_state(), k.shape[2]
            ones = torch.eye(length, dtype=q.dtype).expand(*k.shape[:2], length, length)
            with torch.no_grad():
                weights = plain(q.detach(), k.detach(), ones, **named)  # [B, H, S, T]
            torch.set_rng_state(state)
            mask = tuple((weights == 0)[..., torch.ones(length, length, dtype=torch.bool).tril()].flatten().tolist())
            if torch._C._current_graph_task_id() != -1:
                found.again[mask] += 1
            else:
                assert calls[-1] not in found.forward, "a block computes attention once"
                found.forward[calls[-1]] = mask
        return plain(q, k, v, **named)

    kernel.scaled_dot_product_attention = shown
    try:
        if missing:
            leave_out(missing)
        run = tiny_run(in_fp64({**DROPS, **settings}))
        parts = build(run)
        watch_units(run, parts, calls.append)
        for run.step in range(1, STEPS + 1):
            parts.stepper.forward_backward(parts.train_loader.take(run.config.trainer.global_batch_size), run.step)
            parts.stepper.evaluate(parts.train_loader.take(run.config.trainer.global_batch_size))
    finally:
        kernel.scaled_dot_product_attention = plain
    return found


def masks_of(layout: str, settings: dict[str, Any], missing: str = "") -> list[Masks]:
    whole = {**settings, "parallel.layout": layout}
    return run_workers(tiny_run({**DROPS, **whole}).mesh.world_size, masks, whole, missing)


def assert_own(ranks: list[Masks], recomputes: bool = False) -> None:
    """No two masks are alike: of ranks, steps, micro batches or blocks; those of backward are those of forward."""
    every = Counter(mask for one in ranks for mask in one.forward.values())
    assert [count for count in every.values() if count > 1] == []
    assert all(one.again == Counter(one.forward.values() if recomputes else []) for one in ranks)
    assert all({block for _, _, block in one.forward} for one in ranks)
    assert all(len({step for step, _, _ in one.forward}) == STEPS for one in ranks)


@pytest.fixture(scope="module")
def alone() -> Masks:
    return run_workers(1, masks, {})[0]


def test_in_one_process_every_step_micro_batch_and_block_has_a_mask_of_its_own(alone: Masks) -> None:
    assert_own([alone])
    assert len(alone.forward) == STEPS * MICRO_BATCHES * BLOCKS
    dropped = [dropped for mask in alone.forward.values() for dropped in mask]
    assert sum(dropped) / len(dropped) == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=WIDE)])
def test_under_a_pipeline_masks_are_those_of_one_process_also_when_run_again(alone: Masks, schedule: str) -> None:
    """Stages run forward and backward passes in orders of their own."""
    ranks = masks_of("pp2", {**RECOMPUTES, "parallel.pp.schedule": schedule})
    assert_own(ranks, recomputes=True)
    assert ranks[0].forward | ranks[1].forward == alone.forward


def names() -> list[str]:
    """The installed strategies that compute in fp64."""
    return [name for name in Registry().names("parallel") if "/" not in name and name not in ("deepspeed", "diloco")]


def matrix() -> list[str]:
    """Every layout of docs/layouts.md."""
    pairs = [f"{one}2{other}2" for one, other in combinations(names(), 2)]
    return [*(f"{name}{degree}" for name in names() for degree in (2, 4)), *pairs]


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=() if layout == "pp2tp2" else WIDE) for layout in [*matrix(), "dp2tp2pp2"]]
)
@pytest.mark.wide("layouts")
def test_under_a_layout_masks_differ_wherever_rank_micro_batch_step_or_block_do(layout: str) -> None:
    """None of the strategies has ranks that hold copies of a block's attention."""
    settings = {**RECOMPUTES, "parallel.cp.method": "ulysses"} if "cp" in layout else RECOMPUTES  # no other drops
    try:
        build_model(tiny_run({**DROPS, **settings, "parallel.layout": layout}))
    except UsageError as refusal:
        told = str(refusal)
        assert "splits experts, and the model 'gpt' has none" in told or "a layout with only one of them" in told, told
        pytest.skip(f"{layout} is refused: {told}")
    assert_own(masks_of(layout, settings), recomputes=True)


@WIDE
@pytest.mark.parametrize("recomputes", [{}, RECOMPUTES], ids=["kept", "recomputed"])
@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "fsdp2"])
def test_a_compiled_run_draws_what_the_eager_run_draws(layout: str, recomputes: dict[str, str]) -> None:
    """Forward, and again in backward: losses and gradients show it. One process is in `test_compile.py`."""
    settings = {**DROPS, **recomputes, "parallel.layout": layout, "model.num_layers": 2}
    ranks = tiny_run(settings).mesh.world_size
    eager = run_workers(ranks, quietly, settings)
    compiled = run_workers(ranks, quietly, {**settings, "trainer.compile": "aot_eager"})
    for own, other in zip(compiled, eager, strict=True):
        assert own.losses == pytest.approx(other.losses, rel=1e-10)
        assert own.norms == pytest.approx(other.norms, rel=1e-10)


def quietly(settings: dict[str, Any]) -> Trace:
    warnings.simplefilter("ignore")  # torch's own, as it traces
    return train_steps(settings)


# The comparison has teeth.


@pytest.mark.parametrize("missing", ["unit", "micro batch", pytest.param("place", marks=WIDE)])
def test_masks_that_are_drawn_twice_are_seen(missing: str) -> None:
    with pytest.raises(AssertionError):
        assert_own(masks_of("dp2" if missing == "place" else "", {}, missing))


# Places and keys, without processes.


@pytest.mark.parametrize(
    ("layout", "places"),
    [
        ("", [0]),
        ("dp2", [0, 1]),
        ("zero2", [0, 1]),
        ("fsdp2", [0, 1]),
        ("tp2", [0, 1]),
        ("cp2", [0, 1]),
        ("pp2", [0, 0]),
        ("ep2", [0, 1]),
        ("tp2pp2", [0, 1, 0, 1]),
        ("dp2pp2", [0, 1, 0, 1]),
        ("dp2tp2cp2", [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_ranks_along_axes_that_divide_attention_have_places_of_their_own(layout: str, places: list[int]) -> None:
    run = tiny_run({**(EXPERTS if "ep" in layout else {}), "parallel.layout": layout})
    run.rank = len(places) - 1
    model = build_model(run)
    block = next(unit for unit in model.plan.units if unit.name == "blocks.1")
    assert [place_of(block, model.plan, run.mesh, rank) for rank in range(run.mesh.world_size)] == places
    assert model.seeds is not None
    assert model.seeds.places["blocks.1"] == places[-1]


PLAN = Plan(
    units=(Unit("text", ("tokens", "x"), ("y",)), Unit("vision", ("pixels",), ("z",))),
    context={"tokens": ("batch", "sequence"), "pixels": ("image", "height")},
    activations={"x": ("batch", "sequence", "embed"), "y": ("batch", "sequence", "embed"), "z": ("image", "embed")},
    parameters={},
    flops=None,  # type: ignore[arg-type]
)


@pytest.mark.parametrize(
    ("axis", "text", "vision"),
    [
        (Axis("mine", 2, splits=("mlp", "embed")), [0, 0], [0, 0]),
        (Axis("mine", 2, splits=("vocab",)), [0, 0], [0, 0]),
        (Axis("mine", 2), [0, 0], [0, 0]),
        (Axis("mine", 2, splits=("heads",)), [0, 1], [0, 1]),
        (Axis("mine", 2, activations=("heads",)), [0, 1], [0, 1]),
        (Axis("mine", 2, activations=("units",)), [0, 0], [0, 0]),
        (Axis("mine", 2, entries={"sequence": contiguous}), [0, 1], [0, 0]),
        (Axis("mine", 2, entries={"image": contiguous}), [0, 0], [0, 1]),
    ],
    ids=lambda value: str(getattr(value, "splits", value)),
)
def test_ranks_that_hold_copies_of_a_unit_have_one_place(axis: Axis, text: list[int], vision: list[int]) -> None:
    mesh = Mesh.of([axis], 2)
    for unit, expected in zip(PLAN.units, (text, vision), strict=True):
        assert [place_of(unit, PLAN, mesh, rank) for rank in range(2)] == expected


def test_numbers_are_a_function_of_seed_step_micro_batch_unit_and_place_and_of_nothing_before() -> None:
    text, vision = PLAN.units
    mesh = Mesh.of([Axis("mine", 2, splits=("heads",))], 2)
    one, other = (GeneratorSeeds(PLAN, mesh, rank, "cpu", "") for rank in range(2))

    def drawn(draws: GeneratorSeeds, unit: Unit, *words: int) -> float:
        draws.begin(unit, micro_batch_key(*words))
        return float(torch.rand(()))

    with torch.random.fork_rng():
        own = drawn(one, text, 1, 2, 3)
        torch.rand(7)
        assert drawn(one, text, 1, 2, 3) == own
        others = [drawn(one, text, *words) for words in ((2, 2, 3), (1, 3, 3), (1, 2, 4))]
        others += [drawn(other, text, 1, 2, 3), drawn(one, vision, 1, 2, 3)]
    assert len({own, *others}) == 6


def test_every_sample_has_a_key_of_its_own_and_another_one_in_the_next_step() -> None:
    parts = build(tiny_run({}))
    batch = next(parts.train_loader.take(2))
    entries = parts.stepper.entries  # type: ignore[attr-defined]
    first, again, second = (entries(batch, step)["keys"].tolist() for step in (1, 1, 2))
    assert first == again
    assert len({*first, *second}) == 2 * len(first)


def test_a_micro_batch_without_a_key_is_an_error_where_a_kernel_draws() -> None:
    """A stepper that makes up what units get would have masks of the order of execution, on all ranks the same."""
    for settings, draws in ((DROPS, True), ({**DROPS, "kernels.default": "reference"}, False), ({}, False)):
        run = tiny_run(settings)
        parts = build(run)
        batch = parts.stepper.entries(next(parts.train_loader.take(2)), 1)  # type: ignore[attr-defined]
        without = {name: entry for name, entry in batch.items() if name != ENTRY}
        parts.model.loss(batch)
        if draws:
            with pytest.raises(
                RuntimeError, match=r"^kernels/sdpa draws .*the micro batch that DefaultStepper\.entries"
            ):
                parts.model.loss(without)
        else:
            parts.model.loss(without)
        parts.model.module.eval()
        parts.model.loss(without)


def test_the_fault_of_a_run_names_units_ranks_and_the_remedy() -> None:
    def trace(place: int, **drawn: str) -> Any:
        states = {(1, (int(name[1:]),), "block"): {state} for name, state in drawn.items()}
        return SimpleNamespace(drawn=states, places={"block": place})

    alone = trace(0, s0="a", s1="b")
    assert draws_fault([trace(0, s0="a"), trace(1, s0="c")], alone) == ""
    assert draws_fault([trace(0, s0="a"), trace(0, s0="a")], alone) == ""
    same, copies, order = (
        draws_fault(ranks, alone)
        for ranks in (
            [trace(0, s0="a"), trace(1, s0="a")],
            [trace(0, s0="a"), trace(0, s0="c")],
            [trace(0, s0="b"), trace(0, s1="a")],
        )
    )
    assert same.startswith("the same numbers in unit 'block', samples 0 of step 1, on rank 1 as in unit 'block'")
    assert copies.startswith("other numbers in unit 'block', samples 0 of step 1, on rank 1 than on rank 0")
    assert (
        "than in one process, so they depend on the order of execution; run units on the entries of "
        "DefaultStepper.entries" in order
    )
