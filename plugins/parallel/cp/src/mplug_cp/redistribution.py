"""Samples that are divided by documents, redistributed for what passes states on from interval to interval.

B batch, S positions of a rank, N = B S, M documents of a sample, R ranks. A scan or a short convolution reads a
sequence in order, and documents lie on ranks in another order in every sample. So the rows of its arguments travel to
the ranks that hold them under a zigzag, where states pass on as in samples that are divided at the same positions, and
the rows of its result travel back:

    all-to-all    rows x [N, ...] by documents -> [N, ...] in zigzag
    scan          over zigzag chunks (`states.py`)
    all-to-all    the dual, rows of the result

The gradient of each all-to-all is the other one. All ranks have equally many rows before and after.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import mplug_ops as ops
from mplug import Ranges
from mplug_cp.division import divided
from mplug_cp.needs import Rows
from mplug_cp.rows import rows_in, within
from mplug_cp.zigzag import zigzag
from mplug_ops.transfers import group_named, trading

Core = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Moves:
    """The rows that a rank sends, for each rank in order, and the place of each of its new rows among the received."""

    sent: Tensor
    counts_sent: tuple[int, ...]
    received: Tensor
    counts_received: tuple[int, ...]


def in_zigzag(group: ops.Group, equal_length: int, inner: Core) -> Core:
    """Wrap a core over zigzag chunks into one over samples that are divided by documents.

    The last two arguments of a core are its specification and inputs. Of those before them, tensors [B, S, ...] are
    redistributed, and others (weights, biases) are not.
    """
    if group is None:  # no processes yet: the core is never called
        return inner
    name = group.group_name

    def core(*arguments: Any) -> tuple[Tensor, Tensor | None]:
        *tensors, spec, inputs = arguments
        lengths = inputs.document_lengths
        if lengths is None:  # all samples are divided in zigzag
            return inner(*arguments)
        shape = tensors[0].shape[:2]

        def to_zigzag(x: Tensor | None) -> Tensor | None:
            rows = x is not None and x.shape[:2] == shape and x.dim() > 2
            return redistribute(x, lengths, equal_length, False, name) if rows else x

        on_device = lengths.to(tensors[0].device, non_blocking=True)
        y, state = inner(*map(to_zigzag, tensors), spec, inputs._replace(document_lengths=on_device))
        return redistribute(y, lengths, equal_length, True, name), state

    return core


def _redistribute(x: Tensor, documents: Tensor, equal_length: int, back: bool, group: str) -> Tensor:
    ranks = group_named(group)
    rows = tuple(map(tuple, documents.tolist()))
    moves = moves_of(rows, ranks.rank(), ranks.size(), equal_length, back, x.device)
    received = trading(x.flatten(0, 1)[moves.sent], moves.counts_sent, moves.counts_received, ranks).wait()
    return received[moves.received].view(x.shape)


@lru_cache(maxsize=32)
def moves_of(rows: Rows, rank: int, size: int, equal_length: int, back: bool, device: torch.device) -> Moves:
    """The moves of a micro batch, for all layers; positions are numbered through its samples."""
    length = sum(rows[0])
    by_documents, chunks = ([list[range]() for _ in range(size)] for _ in range(2))
    for sample, lengths in enumerate(rows):
        shares = divided(lengths, size, equal_length)
        for of in range(size):
            by_documents[of] += _shifted(shares[of], sample * length)
            chunks[of] += _shifted(zigzag(length, size, of), sample * length)
    before, after = (chunks, by_documents) if back else (by_documents, chunks)
    sent = [within(one, tuple(before[rank])) for one in after]
    received = [within(after[rank], tuple(one)) for one in before]
    return Moves(
        rows_in([part for parts in sent for part in parts], before[rank], device),
        tuple(sum(map(len, parts)) for parts in sent),
        rows_in(after[rank], [part for parts in received for part in parts], device),
        tuple(sum(map(len, parts)) for parts in received),
    )


def _shifted(parts: Ranges, by: int) -> list[range]:
    return [range(part.start + by, part.stop + by) for part in parts]


redistribute: Any = torch.library.custom_op(
    "mplug_cp::redistribute",
    _redistribute,
    mutates_args=(),
    schema="(Tensor x, Tensor documents, int equal_length, bool back, str group) -> Tensor",
)
"""x [B, S, ...] of a rank, by documents, -> the rows [B, S, ...] of its zigzag chunks; or, if `back`, the reverse.

Dual: the reverse. `documents` [B, M] are the lengths of the documents of whole samples, on the CPU.
"""


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, documents, *ctx.rest = inputs
    ctx.save_for_backward(documents)


def _return(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    (documents,), (equal_length, back, group) = ctx.saved_tensors, ctx.rest
    return redistribute(grad, documents, equal_length, not back, group), None, None, None, None


redistribute.register_fake(lambda x, *_: x.new_empty(x.shape))
redistribute.register_autograd(_return, setup_context=_keep)
