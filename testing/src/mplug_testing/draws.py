"""Watches the random numbers that kernels draw themselves: the state of torch's generators when a unit begins.

A kernel that takes no keys (fused dropout) draws from these generators, so equal states give equal masks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mplug_testing.unit_calls import Call

if TYPE_CHECKING:
    from torch import Tensor

    from mplug_testing.harness import TinySettings, Trace

REMEDY = "run units on the entries of DefaultStepper.entries, called once per micro batch in the loader's order"


def draws_fault(traces: "list[Trace]", reference: "Trace") -> str:
    """The fault in the random numbers that kernels draw in a run; empty if there is none.

    The numbers must be a function of step, micro batch, unit and place. They must differ if any of these differs, and
    be equal on ranks that hold copies. For the first place they must equal those of one process.
    """
    first: dict[str, tuple[int, Call, int]] = {}
    states: dict[tuple[Call, int], tuple[int, str]] = {}
    drawn = [(rank, call, state) for rank, trace in enumerate(traces) for call, state in _states(trace)]
    for rank, call, state in drawn:
        place = traces[rank].places[call[2]]
        where = f"{_place_name(call)} on rank {rank}"
        other, earlier, its_place = first.setdefault(state, (rank, call, place))
        if (earlier, its_place) != (call, place):
            return f"the same numbers {where} as {_place_name(earlier)} on rank {other}; {REMEDY}"
        other, expected = states.setdefault((call, place), (rank, state))
        if state != expected:
            return f"other numbers {where} than on rank {other}, which computes the same part; {REMEDY}"
    for rank, call, state in drawn:
        if traces[rank].places[call[2]] == 0 and state not in reference.drawn.get(call, {state}):
            where = f"{_place_name(call)} on rank {rank}"
            return f"other numbers {where} than in one process, so they depend on the order of execution; {REMEDY}"
    return ""


def _states(trace: "Trace") -> Iterator[tuple[Call, str]]:
    return ((call, state) for call, found in trace.drawn.items() for state in sorted(found))


def _place_name(call: Call) -> str:
    step, samples, unit = call
    return f"in unit '{unit}', samples {', '.join(map(str, samples))} of step {step},"


# A kernel that draws, for tests of plugins that run units again.


@contextmanager
def drawing_attention(calls: list[None]) -> Iterator[None]:
    """In the block, plain-torch attention of new models drops some of its outputs by torch's own generator.

    Every call appends to `calls`.
    """
    from torch.nn.functional import dropout

    from mplug_nn import SLOTS

    slot = SLOTS["Attention.core"]
    plain = slot.default

    def drawing(*arguments: Any, **named: Any) -> "Tensor":
        calls.append(None)
        return dropout(plain(*arguments, **named), 0.3)

    drawing.__dict__.update(vars(plain))
    object.__setattr__(slot, "default", drawing)  # new modules take it from there (`set_defaults`)
    try:
        yield
    finally:
        object.__setattr__(slot, "default", plain)


def first_gradients(settings: "TinySettings") -> "dict[str, Tensor]":
    """The gradients in the sinks after the first micro batch of a tiny run, which is a whole step."""
    from mplug.training.assembly import build
    from mplug_testing.harness import in_fp64, tiny_run

    run = tiny_run(in_fp64(settings))
    parts = build(run)
    run.step = 1
    feed = parts.train_loader
    first = next(iter(feed.loader.take(run.config.trainer.global_batch_size)))
    parts.stepper.forward_backward(feed.step_of([first]), 1)
    return {name: sink.buffer.clone() for name, sink in parts.model.sinks.items()}
