"""Copies of the parts of a run's state in the memory of the CPU, and the continuation of a run from such parts."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from mplug.errors import UsageError
from mplug.run.run import Run
from mplug_heal.live_state import LiveState, fill
from mplug_saving.boxes import Boxed, State, held_boxes
from mplug_saving.changes import Changes
from mplug_saving.names import file_of
from mplug_saving.position import Position


def copied(state: State, reused: State) -> State:
    """Copies of parts in the memory of the CPU; on a GPU, they are complete when it is synchronized.

    The copies take the place of those in `reused` that fit.
    """
    found = State()
    for name, boxed in state.items():
        found[name] = Boxed(boxed.shape, {})
        for start, part in boxed.parts.items():
            pinned = part.is_cuda or torch.cuda.is_initialized()
            target = _buffer(reused, name, start, tuple(part.shape), part.dtype, pinned)
            found[name].parts[start] = target.copy_(part.detach(), non_blocking=True)
    return found


def second_copies(
    run: Run, position: Position, live: LiveState, ranks: Sequence[int], reused: Mapping[int, State]
) -> dict[int, State]:
    """Copies of what other ranks own: of this rank's own replicas, and of messages for the rest. Collective."""
    held = position.state(held_boxes)
    found, missing = dict[int, State](), dict[str, Boxed]()
    for rank in ranks:
        replicas, own = State(), found.setdefault(rank, State())
        for name, start, shape in live.index.chunks_in(file_of(rank)):
            shape_of = live.index.shapes[name]
            part = held[name].parts.get(start) if name in held else None
            if part is not None and tuple(part.shape) == shape:
                replicas.setdefault(name, Boxed(shape_of, {})).parts[start] = part.detach()
            else:
                pinned = run.device.startswith("cuda")
                empty = _buffer(reused.get(rank, {}), name, start, shape, live.dtypes[name], pinned)
                missing.setdefault(name, Boxed(shape_of, {})).parts[start] = empty
                own.setdefault(name, Boxed(shape_of, {})).parts[start] = empty
        for name, boxed in copied(replicas, reused.get(rank, {})).items():
            own.setdefault(name, Boxed(boxed.shape, {})).parts.update(boxed.parts)
    fill(run, live, missing)
    return found


def _buffer(
    reused: State, name: str, start: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype, pinned: bool
) -> Tensor:
    """The tensor of an older copy if it fits, which saves the time to pin memory; otherwise a new one."""
    old = reused[name].parts.get(start) if name in reused else None
    if old is not None and tuple(old.shape) == shape and old.dtype == dtype:
        return old
    return torch.empty(shape, dtype=dtype, pin_memory=pinned)


def merged(states: Iterable[State]) -> State:
    """The parts of several ranks as one state."""
    found = State()
    for state in states:
        for name, boxed in state.items():
            found.setdefault(name, Boxed(boxed.shape, {})).parts.update(boxed.parts)
    return found


def continue_from(
    run: Run, position: Position, live: LiveState, step: int, history: list[dict[str, object]], changes: Changes
) -> None:
    """Continue a run after `step`, from the parts that its ranks hold. Collective.

    `history` are the changes of earlier resumes, and `changes` those of this one.
    """
    wanted = position.state(held_boxes)
    for name, boxed in wanted.items():
        if live.index.shapes.get(name) != boxed.shape:
            raise UsageError(f"the copies lack '{name}' of shape {boxed.shape}; resume from the last checkpoint")
    position.changes, position.history = changes, [*history, *changes.record(step)]
    fill(run, live, wanted)
    position.filled()
    run.step = step
    position.load_plain(f"the state of the run after step {step}", live.plain)
