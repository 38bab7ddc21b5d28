"""The same run under any layout: losses, every gradient and the gradient norm equal those of one process.

And the test has teeth: each planted mistake, made in the workers, is caught.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mplug.testing import run_workers

STEPS = 5
BASE = {
    "model.preset": "null",
    "model.num_layers": 4,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 2,
    "model.vocab_size": 259,
    "model.qk_norm": True,
    "model.init_std": 0.06,
    "data.name": "mock",
    "data.vocab_size": 259,
    "trainer.seq_length": 16,
    "trainer.micro_batch_size": 2,
    "trainer.global_batch_size": 8,
    "trainer.steps": 100,
    "trainer.device": "cpu",
    "trainer.eval_every": 100,
    "trainer.eval_samples": 8,
    "schedule.name": "constant",
    "schedule.warmup_steps": 50,
}
"""A small model with everything that can go wrong: GQA, QK-norm, a vocabulary that no degree divides."""

Boxes = list[tuple[tuple[int, ...], Tensor]]


@dataclass
class Trace:
    """What a rank saw: losses and norms of every step, and the boxes of the gradients that it owns."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Boxes]] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    val_loss: float = 0.0


def train_steps(settings: dict[str, object], mutation: str | None) -> Trace:
    """Be one rank of a run of `STEPS` steps; labels are ignored at random, so that micro batches differ in tokens."""
    from mplug.build import build
    from mplug.groups import Groups
    from mplug.loop import evaluate
    from mplug.model import region
    from mplug.registry import Registry
    from mplug.resolve import default_settings, resolve
    from mplug.run import prepare
    from mplug.schedule import learning_rate
    from mplug.settings import read_assignments

    assignments = [f"{name}={value}" for name, value in settings.items()]
    config = resolve(Registry(), default_settings(), read_assignments(assignments))
    run = prepare(config)
    assert run.mesh.world_size == dist.get_world_size()
    run.rank = rank = dist.get_rank()
    run.groups = Groups(rank)
    if mutation is not None:
        MUTATIONS[mutation]()
    parts, trace = build(run), Trace()
    read = parts.train_loader.read  # type: ignore[attr-defined]
    parts.train_loader.read = lambda ids: with_ragged_labels(read(ids))  # type: ignore[attr-defined]
    for step in range(1, STEPS + 1):
        parts.stepper.forward_backward(parts.train_loader.take(config.trainer.global_batch_size), step)
        owned = {
            piece.name: [
                (box.start, region(piece.gradient, box).clone())
                for box in piece.placement.boxes(rank)
                if min(box.copies) == rank
            ]
            for piece in parts.pieces
        }
        lr = learning_rate(step, config.optimizer.lr, config.schedule, config.trainer.steps)
        result = parts.stepper.update(lr, config.optimizer.weight_decay)
        trace.gradients.append(owned)
        trace.losses.append(float(result.loss))
        trace.norms.append(float(result.grad_norm))
    trace.shapes = {name: placement.shape for name, placement in parts.model.placements.items()}
    trace.val_loss = evaluate(run, parts)
    return trace


def with_ragged_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first labels of a sample are ignored: as many as its number modulo 11."""
    labels = batch["labels"].clone()
    for row, number in enumerate(batch["sample_ids"].tolist()):
        labels[row, : number % 11] = -100
    return {**batch, "labels": labels}


# Planted mistakes, made inside the workers before the model is built.


def over_changed(names: tuple[str, ...], over: tuple[str, ...]) -> Callable[[], None]:
    def plant() -> None:
        from dataclasses import replace

        from mplug.plan import Plan

        original = Plan.match

        def match(self: Plan, found: object) -> dict:
            described = original(self, found)  # type: ignore[arg-type]
            return {name: replace(one, over=over) if name.endswith(names) else one for name, one in described.items()}

        Plan.match = match  # type: ignore[method-assign, assignment]

    return plant


def untied() -> None:
    from mplug.model import Model

    original = Model.place

    def place(self: Model, mesh: object, stages: object) -> None:
        from dataclasses import replace

        original(self, mesh, stages)  # type: ignore[arg-type]
        for name, placement in self.placements.items():
            over = tuple(axis for axis in placement.parameter.over if axis != "units")
            self.placements[name] = replace(placement, parameter=replace(placement.parameter, over=over))

    Model.place = place  # type: ignore[method-assign, assignment]


def counted_twice() -> None:
    import mplug.stepper
    from mplug.model import region

    def owned(pieces: list, rank: int) -> list[Tensor]:
        return [
            region(piece.gradient, box)
            for piece in pieces
            for box in piece.placement.boxes(rank)
            if min(box.copies) == rank or piece.name == "head.norm.weight"
        ]

    mplug.stepper.owned_gradients = owned  # type: ignore[assignment]


def kv_heads_swapped() -> None:
    import mplug.plan

    original = mplug.plan._cut

    def cut(segment: object, axis: str, size: int, index: int) -> object:
        swapped = size - 1 - index if segment.axis == "kv_heads" else index  # type: ignore[attr-defined]
        return original(segment, axis, size, swapped)  # type: ignore[arg-type]

    mplug.plan._cut = cut  # type: ignore[assignment]


def micro_batches_averaged() -> None:
    from mplug.model import Model

    original = Model.loss

    def loss(self: Model, batch: dict) -> tuple[Tensor, Tensor]:
        total, count = original(self, batch)
        return total / count, torch.ones_like(count)

    Model.loss = loss  # type: ignore[method-assign, assignment]


MUTATIONS: dict[str, Callable[[], None]] = {
    "norm gradients are not reduced": over_changed(("norm1.weight", "norm2.weight", "norm.weight"), ("batch",)),
    "tied embeddings are not reduced": untied,
    "QK-norm gradients are not reduced": over_changed(("q_norm", "k_norm"), ("batch",)),
    "a parameter counts twice in the norm": counted_twice,
    "two KV heads are swapped": kv_heads_swapped,
    "micro batches are averaged": micro_batches_averaged,
}


# The comparison.


def logical(traces: list[Trace], step: int, name: str) -> Tensor:
    """A gradient of the whole model, put together from all ranks' boxes; an element that nobody owns is NaN."""
    shape = next(trace.shapes[name] for trace in traces if name in trace.shapes)
    whole = torch.full(shape, float("nan"))
    for trace in traces:
        for start, values in trace.gradients[step].get(name, []):
            whole[tuple(slice(s, s + n) for s, n in zip(start, values.shape, strict=True))] = values
    return whole


def assert_equal(traces: list[Trace], reference: Trace) -> None:
    """Losses within 1e-5 and, for every parameter, |g - g_ref| <= 1e-5 max(|g_ref|, 1e-3 of the global norm)."""
    for trace in traces:
        assert trace.losses == pytest.approx(reference.losses, rel=1e-5)
        assert trace.norms == pytest.approx(reference.norms, rel=1e-5)
        assert trace.val_loss == pytest.approx(reference.val_loss, rel=1e-5)
    for step in range(STEPS):
        gradients = {name: logical([reference], step, name) for name in reference.shapes}
        whole = torch.stack([g.norm() for g in gradients.values()]).norm()
        for name, expected in gradients.items():
            error = (logical(traces, step, name) - expected).norm()
            assert error <= 1e-5 * max(expected.norm(), 1e-3 * whole), f"{name} at step {step + 1}: {error}"


REFERENCES: dict[tuple, Trace] = {}


def reference_of(settings: dict[str, object]) -> Trace:
    """The same run in one process: made once for every model."""
    alone = {name: value for name, value in settings.items() if not name.startswith("parallel.")}
    key = tuple(sorted((name, str(value)) for name, value in alone.items()))
    if key not in REFERENCES:
        REFERENCES[key] = run_workers(1, train_steps, alone, None)[0]
    return REFERENCES[key]


def traces_of(layout: str, world_size: int, changes: dict[str, object], mutation: str | None = None) -> list[Trace]:
    return run_workers(world_size, train_steps, {**BASE, **changes, "parallel.layout": layout}, mutation)


LAYOUTS = [("tp2", 2), ("tp4", 4), ("pp2", 2), ("pp4", 4), ("dp2", 2), ("dp2tp2", 4), ("tp2pp2", 4), ("dp2tp2pp2", 8)]
WITHOUT_SEQUENCE_PARALLELISM = {"parallel.tp.sequence_parallel": False}
EVERYTHING = {
    "model.position": "learned",
    "model.max_position_embeddings": 16,
    "model.bias": True,
    "model.activation": "swiglu",
    "model.ffn_hidden_size": 64,
    "model.norm": "rmsnorm",
    "model.tie_embeddings": True,
    "model.dropout": 0.1,
}
VARIANTS = [
    ("tp2", 2, {"model.num_kv_heads": 1}),
    ("tp2", 2, {"model.num_kv_heads": 4}),
    ("tp4", 4, {"model.num_kv_heads": 1}),
    ("tp4", 4, {"model.num_kv_heads": 1, **WITHOUT_SEQUENCE_PARALLELISM}),
    ("tp4", 4, {"model.num_kv_heads": 4}),
    ("tp2", 2, EVERYTHING),
    ("tp2", 2, {**EVERYTHING, **WITHOUT_SEQUENCE_PARALLELISM}),
    ("tp2pp2", 4, {**EVERYTHING, "model.num_kv_heads": 1}),
    ("pp2", 2, {"model.tie_embeddings": True}),
    ("pp4", 4, {"model.tie_embeddings": True}),
    ("pp2", 2, {"parallel.pp.schedule": "gpipe"}),
    ("pp2", 2, {"model.num_layers": 3}),
    ("pp2", 2, {"parallel.pp.units_per_stage": "[2, 4]"}),
    ("pp4", 4, {"parallel.pp.units_per_stage": "[1, 1, 3, 1]", "model.tie_embeddings": True}),
    ("dp2pp2", 4, {"model.tie_embeddings": True}),
    ("tp2", 2, {"kernels.default": "reference", "model.attention_dropout": 0.1, "model.dropout": 0.1}),
    ("dp4", 4, {"parallel.dp.bucket_mib": 0.01}),
]


@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS, ids=[layout for layout, _ in LAYOUTS])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_layout_gives_the_run_of_one_process(layout: str, world_size: int, sequence_parallel: bool) -> None:
    if not sequence_parallel and "tp" not in layout:
        pytest.skip("sequence parallelism is tp's")
    changes: dict[str, object] = {} if sequence_parallel else dict(WITHOUT_SEQUENCE_PARALLELISM)
    assert_equal(traces_of(layout, world_size, changes), reference_of({**BASE, **changes}))


@pytest.mark.parametrize(("layout", "world_size", "changes"), VARIANTS, ids=str)
def test_every_shape_of_model_gives_the_run_of_one_process(
    layout: str, world_size: int, changes: dict[str, object]
) -> None:
    assert_equal(traces_of(layout, world_size, changes), reference_of({**BASE, **changes}))


TEETH = [
    ("norm gradients are not reduced", "tp2", {}),
    ("tied embeddings are not reduced", "pp2", {"model.tie_embeddings": True}),
    ("QK-norm gradients are not reduced", "tp2", WITHOUT_SEQUENCE_PARALLELISM),
    ("a parameter counts twice in the norm", "tp2", {}),
    ("two KV heads are swapped", "tp2", {}),
    ("micro batches are averaged", "dp2", {}),
]


@pytest.mark.parametrize(("mutation", "layout", "changes"), TEETH, ids=[mutation for mutation, _, _ in TEETH])
def test_the_comparison_catches(mutation: str, layout: str, changes: dict[str, object]) -> None:
    traces = traces_of(layout, 2, changes, mutation)
    with pytest.raises(AssertionError):
        assert_equal(traces, reference_of({**BASE, **changes}))
