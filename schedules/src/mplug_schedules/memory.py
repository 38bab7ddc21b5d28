"""The memory of activations that the ranks of a pipeline table hold, given the bytes of a micro batch in each chunk."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mplug_schedules.actions import Action, Kind, Table


@dataclass(frozen=True)
class Footprint:
    """Bytes of one micro batch in one chunk.

    `kept` is what a forward pass leaves for the backward pass, with the chunk's inputs. `postponed` is what the
    activation half of the backward pass leaves for the weight half. `inputs` are the activations that enter the chunk,
    `upstream` the gradients of its outputs that the backward pass receives. `beyond` is, for each kind of computation,
    its peak beyond the memory that is held when it starts.
    """

    kept: int
    postponed: int = 0
    inputs: int = 0
    upstream: int = 0
    beyond: Mapping[Kind, int] = field(default_factory=dict)


def peak_bytes(table: Table, rank: int, footprints: Sequence[Footprint]) -> int:
    """The peak of the bytes that a rank holds in a step; `footprints` has an entry for each chunk.

    Received tensors count from their receive, sent ones until their send.
    """
    return max(number for _, number in held_bytes(table, rank, footprints))


def held_bytes(table: Table, rank: int, footprints: Sequence[Footprint]) -> Iterator[tuple[Action, int]]:
    """For each action of a rank: the peak of the bytes that the rank holds while it runs."""
    held = 0
    for action in table.rows[rank]:
        own, before, after = _around(footprints, action.chunk)
        held_before = held
        match action.kind:
            case Kind.RECEIVE_FORWARD:
                held += own.inputs
            case Kind.RECEIVE_BACKWARD:
                held += own.upstream
            case Kind.FORWARD:
                held += own.kept - own.inputs + after
            case Kind.BACKWARD:
                held += before - own.kept - own.upstream
            case Kind.INPUT_GRADIENT:
                held += before + own.postponed - own.kept - own.upstream
            case Kind.WEIGHT_GRADIENT:
                held -= own.postponed
            case Kind.SEND_FORWARD:
                held -= after
            case Kind.SEND_BACKWARD:
                held -= before
        yield action, max(held, held_before + own.beyond.get(action.kind, 0))


def _around(footprints: Sequence[Footprint], chunk: int) -> tuple[Footprint, int, int]:
    """(the chunk's footprint, bytes of the gradients that leave it, bytes of the activations that leave it)."""
    before = footprints[chunk - 1].upstream if chunk else 0
    after = footprints[chunk + 1].inputs if chunk + 1 < len(footprints) else 0
    return footprints[chunk], before, after
