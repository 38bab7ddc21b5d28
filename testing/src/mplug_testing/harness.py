"""A run of a few steps inside a test: built as `mplug train` builds it, saved nowhere, and fully traced.

Settings are a mapping, flat as {"model.num_layers": 2, "parallel.layout": "dp2"} or nested as a config file. They
override the tiny run of `tiny.yaml`, which overrides the default run.

Training runs in fp64 unless the settings name another precision. In fp64 a wrong sum and a rounding error differ by
orders of magnitude: two correct runs differ by about 1e-15, and the bound is `EXACT`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mplug.config.defaults import default_settings
from mplug.config.sources import Settings, from_mapping, merge, read_file
from mplug.errors import UsageError
from mplug.precisions.dtypes import FORMATS
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug_testing.unit_calls import Call, generator_state, watch_units
from mplug_testing.workers import WorkerFailed, run_workers

if TYPE_CHECKING:
    from torch import Tensor

    from mplug.config.binding import RunConfig
    from mplug.contracts.micro_batch import MicroBatch, RankBatch
    from mplug.gradients.sinks import GradientSink
    from mplug.layout.placement import Placement
    from mplug.training.assembly import Parts

TinySettings = Mapping[str, Any]
Boxes = list[tuple[tuple[int, ...], "Tensor"]]
"""Parts of a logical tensor: the start of each part, and its values."""

Portions = Callable[[Iterator["MicroBatch"]], Iterator["MicroBatch"]]
"""Divides a loader's micro batches in another way."""

STEPS = 2
"""The gradients of the second step depend on the weights after the first update."""
EXACT = 1e-10
"""Maximum relative difference between two fp64 runs of the same computation.

The largest difference by rounding in docs/layouts.md is 1.3e-14.
"""
EXACT_MOVEMENT = 1e-6
"""The bound for weights after the last step: Adam divides a gradient by its own size, which amplifies its rounding."""
ROUNDING = 4.0
"""Maximum ratio of the fp32 error under a layout to that of one process: another order of sums rounds differently."""


@dataclass
class Trace:
    """The record of a rank: losses and norms of every step, and its own boxes of gradients and weights.

    Gradients are those of trained parameters, weights those of all parameters. `initial` are the weights before the
    first step, `weights` those after the last. `announced` holds for every step how often each gradient of the rank was
    announced as final. `statistics` are those of each step, over all ranks. `drawn` holds the states of torch's
    generator when a unit began to compute. `places` holds the rank's index among the ranks that compute different parts
    of a unit (`mplug_steps.GeneratorSeeds`). `taken` is the number of micro batches of the evaluation. `taken_early`
    is whether the stepper took many of them before it needed them.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Boxes]] = field(default_factory=list)
    initial: dict[str, Boxes] = field(default_factory=dict)
    weights: dict[str, Boxes] = field(default_factory=dict)
    announced: list[dict[str, int]] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    statistics: "list[dict[str, Tensor]]" = field(default_factory=list)
    val_loss: float = 0.0
    taken: int = 0
    taken_early: bool = False
    drawn: dict[Call, set[str]] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)


def tiny_config(settings: TinySettings) -> "RunConfig":
    """The default run, overridden by the tiny run, overridden by `settings`; UsageError if they are invalid."""
    return resolve(installed_plugins(), tiny_settings(), overrides_of(settings))


def overrides_of(settings: TinySettings) -> Settings:
    """The settings of a test as the overrides of a run."""
    own: Settings = {}
    for name, value in settings.items():
        own = merge(own, from_mapping(value, "the suite's settings", tuple(name.split("."))))
    return own


@cache
def tiny_settings() -> Settings:
    """The default run without its extensions, overridden by the tiny run. Nothing changes settings in place."""
    default = {key: setting for key, setting in default_settings().items() if key[0] != "extensions"}
    return merge(default, read_file(Path(__file__).with_name("tiny.yaml"), "tiny.yaml"))


def installed_plugins() -> Registry:
    """The plugins installed for this process, whose folders are read once."""
    registry = Registry.of_process()
    registry.entries()  # reads the folders now
    return registry


def in_fp64(settings: TinySettings) -> TinySettings:
    """The same settings, with precision fp64 unless they name one."""
    return {"trainer.precision": "fp64", **settings}


def tiny_run(settings: TinySettings) -> Run:
    """A prepared tiny run. If torch's default process group exists, this process is its rank of that group."""
    return as_rank(prepare(tiny_config(settings)))


def as_rank(run: Run) -> Run:
    """The run with the rank of this process, if torch's default process group exists."""
    import torch.distributed as dist

    from mplug.distributed.groups import Groups

    if dist.is_initialized():
        assert run.mesh.world_size == dist.get_world_size(), f"the layout is for {run.mesh.world_size} ranks"
        run.rank = dist.get_rank()
        run.groups = Groups(run.rank)
    return run


def as_they_come(batches: Iterator["MicroBatch"]) -> Iterator["MicroBatch"]:
    """Micro batches as the loader returns them."""
    return batches


def unevenly(batches: Iterator["MicroBatch"]) -> Iterator["MicroBatch"]:
    """The same samples with every second micro batch cut in two: equally many on every rank, of different sizes."""
    for number, batch in enumerate(batches):
        size = len(batch["sample_ids"])
        cuts = (0, 1, size) if number % 2 == 0 and size > 1 else (0, size)
        for start, stop in pairwise(cuts):
            yield {name: entry[start:stop] if len(entry) == size else entry for name, entry in batch.items()}


def train_steps(
    settings: TinySettings,
    before: Callable[[], None] | None = None,
    portions: Portions = as_they_come,
) -> Trace:
    """Call `before`, then train `STEPS` steps as one rank of the run in this process; in fp64 by default.

    Some labels are ignored, so that micro batches differ in their number of targets. `portions` may divide micro
    batches in another way.
    """
    from mplug.training.assembly import build
    from mplug.training.schedule import learning_rate
    from mplug_validation import evaluate

    run = tiny_run(in_fp64(settings))
    if before is not None:
        before()
    config, parts, trace = run.config, build(run), Trace()
    trace.initial = owned_values(run, parts)
    announced = listen(parts)
    watch_units(run, parts, lambda call: trace.drawn.setdefault(call, set()).add(generator_state()))
    trace.places = dict(getattr(parts.model.seeds, "places", {}))
    for step in range(1, STEPS + 1):
        run.step = step
        batches = changed_batches(parts, config.trainer.global_batch_size, portions)
        parts.stepper.forward_backward(batches, step)
        trace.announced.append(dict(announced))
        announced.update(dict.fromkeys(announced, 0))
        trace.gradients.append(_owned(run, [(p.name, p.gradient, p.placement) for p in parts.pieces]))
        lr = learning_rate(step, config.optimizer.lr, config.schedule, config.trainer.steps)
        result = parts.stepper.update(lr, config.optimizer.weight_decay)
        trace.losses.append(float(result.loss))
        trace.norms.append(float(result.grad_norm))
        trace.statistics.append({name: value.clone() for name, value in result.statistics.items()})
    trace.weights = owned_values(run, parts)
    trace.shapes = {name: placement.shape for name, placement in parts.model.placements.items()}
    taking = _Taking(parts)
    trace.val_loss = evaluate(run, parts, taking.watch)
    trace.taken, trace.taken_early = taking.taken, taking.ahead > len(parts.model.stages.units)
    return trace


def changed_batches(parts: "Parts", num_samples: int, portions: Portions = as_they_come) -> "Iterator[RankBatch]":
    """The micro batches of a step, after `portions` and with ragged labels."""
    whole = parts.train_loader.loader.take(num_samples)
    return parts.train_loader.step_of([with_ragged_labels(batch) for batch in portions(whole)])


class _Taking:
    """Counts the micro batches that a stepper takes for an evaluation, and how many of them it takes `ahead` of use."""

    def __init__(self, parts: "Parts") -> None:
        self.taken = self.computed = self.ahead = 0
        self._run = parts.model.run
        parts.model.run = self._through  # type: ignore[method-assign]

    def _through(self, batch: "Mapping[str, Tensor]", chunk: int | None = None) -> "dict[str, Tensor]":
        self.computed += 1
        self.ahead = max(self.ahead, self.taken - self.computed)
        return self._run(batch, chunk)

    def watch(self, batches: "Iterator[RankBatch]") -> "Iterator[RankBatch]":
        """Yield the same micro batches, and count them."""
        for batch in batches:
            self.taken += 1
            yield batch


def train_ranks(world_size: int, settings: TinySettings, portions: Portions = as_they_come) -> list[Trace]:
    """Train on all ranks of a run, each in a process, in fp64 by default; return the trace of each rank.

    Raises UsageError if a rank refuses the run, and WorkerFailed or TimeoutError if a rank fails.
    """
    try:
        return run_workers(world_size, train_steps, dict(settings), None, portions)
    except WorkerFailed as error:
        if error.refusal:
            raise UsageError(error.refusal) from None
        raise


def with_ragged_labels(batch: "MicroBatch") -> "MicroBatch":
    """Ignore the first labels of each sample; their number is the sample's number modulo 11."""
    labels = batch["labels"].clone()
    for row, number in enumerate(batch["sample_ids"].tolist()):
        labels[row, : number % 11] = -100
    return {**batch, "labels": labels}


def listen(parts: "Parts") -> dict[str, int]:
    """Counts, from now on, how often each gradient is announced as final."""
    announced = dict.fromkeys(parts.model.sinks, 0)

    def hear(sink: "GradientSink") -> None:
        announced[sink.name] += 1

    for sink in parts.model.sinks.values():
        sink.listeners.append(hear)
    return announced


def owned_values(run: Run, parts: "Parts") -> dict[str, Boxes]:
    """Copies of the boxes of all parameters, trained or not; each box comes from the first rank that holds it."""
    return _owned(run, parts.held())


def _owned(run: Run, tensors: "Iterable[tuple[str, Tensor, Placement]]") -> dict[str, Boxes]:
    from mplug.gradients.region import region

    return {
        name: [
            (box.start, region(tensor, box).clone())
            for box in placement.boxes(run.rank)
            if box.copies.first == run.rank
        ]
        for name, tensor, placement in tensors
    }


def logical(parts: Iterable[Mapping[str, Boxes]], name: str, shape: tuple[int, ...]) -> "Tensor":
    """A tensor of the whole model in fp64, assembled from all ranks' boxes; elements that no rank owns are NaN."""
    import torch

    whole = torch.full(shape, float("nan"), dtype=torch.float64)
    for boxes in parts:
        for start, values in boxes.get(name, []):
            whole[tuple(slice(s, s + n) for s, n in zip(start, values.shape, strict=True))] = values
    return whole


def run_tolerance(format_: str) -> float:
    """Maximum relative error of a tiny run's losses and gradients against plain torch, by the format of activations.

    In bf16 it is 0.1: a gradient of the tiny run sums few numbers, each with an error of one or two percent.
    """
    return max(1e-4, 25.6 * 2.0 ** -FORMATS[format_].significand)


def difference(traces: list[Trace], reference: Trace, tolerance: float = EXACT) -> str:
    """The first difference between a run and one process, as a sentence; empty if there is none.

    Losses and norms must have a relative error of at most `tolerance`. For every parameter,
    |g - g_ref| <= tolerance * max(|g_ref|, 1e-3 of the gradient's global norm).
    """
    return next((what for error, what in _errors(traces, reference) if not error <= tolerance), "")


def largest_error(traces: list[Trace], reference: Trace) -> float:
    """The largest of the errors that `difference` compares with its tolerance; NaN counts as infinite."""
    return max(math.inf if math.isnan(error) else error for error, _ in _errors(traces, reference))


def _errors(traces: list[Trace], reference: Trace) -> Iterator[tuple[float, str]]:
    """(relative error, sentence for the case that it is too large) of everything that is compared."""
    for step in range(STEPS):
        losses, norms = ([getattr(trace, name)[step] for trace in traces] for name in ("losses", "norms"))
        yield from _of_numbers(f"loss of step {step + 1}", losses, reference.losses[step])
        yield from _of_gradients(step, traces, reference)
        yield from _of_numbers(f"gradient norm of step {step + 1}", norms, reference.norms[step])
    yield from _of_numbers("validation loss", [trace.val_loss for trace in traces], reference.val_loss)
    yield from _of_evaluation(traces)


def tolerance_of(settings: TinySettings) -> float:
    """The error bound of an fp64 run against one process: `EXACT` plus the tolerances that its plugins declare."""
    return EXACT + sum(variance.tolerance for variance in prepare(tiny_config(settings)).variances.values())


def movement_of(tolerance: float) -> float:
    """The bound for weights after the last step, from a bound for gradients; at most 1 (all of the movement)."""
    return min(1.0, EXACT_MOVEMENT * (tolerance / EXACT))


def rounding_bound(alone: Trace, exact: Trace) -> float:
    """The tolerance of low-precision runs against `exact`, the run of one process in fp64.

    It is `ROUNDING` times the largest error of `alone`, the run of one process in that low precision.
    """
    return ROUNDING * largest_error([alone], exact)


def weights_off(traces: list[Trace], reference: Trace, tolerance: float = EXACT_MOVEMENT) -> str:
    """The first parameter whose values differ from those of one process; empty if none does.

    Initial values must be equal. After the last step, |w - w_ref| <= tolerance * max(|moved|, 1e-3 of all parameters'
    movement). A parameter that has no gradient in one process must still have its initial values.
    """
    names = reference.shapes
    first = {name: logical([reference.initial], name, shape) for name, shape in names.items()}
    last = {name: logical([reference.weights], name, shape) for name, shape in names.items()}
    whole = math.sqrt(sum(float((last[name] - first[name]).norm()) ** 2 for name in names))
    for name, shape in names.items():
        found = logical([trace.initial for trace in traces], name, shape)
        if not bool((found == first[name]).all()):
            return f"the initial values of '{name}' are not those of one process"
    for name, shape in names.items():
        found = logical([trace.weights for trace in traces], name, shape)
        if any(name not in gradients for gradients in reference.gradients) and not bool((found == first[name]).all()):
            return f"'{name}' is frozen, and its values change within {STEPS} steps"
        error = float((found - last[name]).norm())
        allowed = tolerance * max(float((last[name] - first[name]).norm()), 1e-3 * whole)
        if not error <= allowed:
            return f"'{name}' has an error of {error:.3g} after {STEPS} steps (allowed: {allowed:.3g})"
    return ""


def _of_numbers(figure: str, found: list[float], expected: float) -> Iterator[tuple[float, str]]:
    for rank, value in enumerate(found):
        yield (
            _relative(abs(value - expected), abs(expected)),
            f"the {figure} on rank {rank} is {value}, and in one process {expected}",
        )


def _of_evaluation(traces: list[Trace]) -> Iterator[tuple[float, str]]:
    remedy = "a run that is asked to stop could not end the evaluation early (Stepper.evaluate)"
    for rank, trace in enumerate(traces):
        if trace.taken != traces[0].taken:
            counts = f"{trace.taken} micro batches of an evaluation on rank {rank}, and {traces[0].taken} on rank 0"
            yield math.inf, f"the stepper takes {counts}: {remedy}"
        if trace.taken_early:
            yield math.inf, f"the stepper takes micro batches of an evaluation long before it computes them: {remedy}"


def _of_gradients(step: int, traces: list[Trace], reference: Trace) -> Iterator[tuple[float, str]]:
    expected = {n: logical([reference.gradients[step]], n, reference.shapes[n]) for n in reference.gradients[step]}
    for name in sorted({name for trace in traces for name in trace.gradients[step]} - expected.keys()):
        yield math.inf, f"'{name}' is frozen, and has a gradient at step {step + 1}"
    whole = math.sqrt(sum(float(gradient.norm()) ** 2 for gradient in expected.values()))
    for name, gradient in expected.items():
        error = float((logical([t.gradients[step] for t in traces], name, reference.shapes[name]) - gradient).norm())
        size = max(float(gradient.norm()), 1e-3 * whole)
        yield (
            _relative(error, size),
            f"the gradient of '{name}' at step {step + 1} has an error of {error:.3g}, and its norm is {size:.3g}; "
            f"check over which ranks it is summed (an axis over which listeners sum must be in sinks.reduced_over), "
            f"and the plan's `over` and dims of the parameter",
        )


def _relative(error: float, size: float) -> float:
    return error / size if size else math.inf if error else 0.0
