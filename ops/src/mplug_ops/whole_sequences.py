"""Offers of functions of whole sequences, which modules use in forward.

They fill the slots with `Slot.joins_sequences` and `Slot.gathers_positions`. B batch, S positions of this rank, R ranks
that divide a sequence.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mplug.layout.mesh import DocumentMap, Mesh
from mplug.layout.plan import TOKENS_AXIS
from mplug.model.model import Model
from mplug.model.slots.offers import Offer, Site
from mplug.run.run import Run
from mplug_ops.collectives import all_gather
from mplug_ops.divisions import in_rank_order, in_sequence_order, number_of


def whole_sequences(run: Run, model: Model) -> list[Offer]:
    """The supplier of such slots: it gathers the positions of all ranks that divide the sequence, in sequence order.

    If ranks divide samples by documents, it needs the lengths of these for that order. Without, it takes the samples
    for ones without documents: right for these, and for functions that do not depend on the order of positions.

    Collective: all ranks make the process group here, including ranks whose stage has no such slot. It is the group in
    which statistics are summed over a sequence (`token_sums`).
    """
    axes = [axis.name for axis in run.mesh.views["dense"] if axis.divides(TOKENS_AXIS)]
    if not model.plan.buffers or not axes:
        return []
    group, own = run.group(*axes), run.mesh.number(run.rank, axes)
    mesh, ranks = run.mesh, list(run.mesh.group(run.rank, *axes))  # a compiler cannot trace what computes these ranks

    def parts_at(length: int, documents: tuple[int, ...] = ()) -> list[list[range]]:
        return [parts_of(mesh, rank, length, documents=documents) for rank in ranks]

    usual_length = run.config.trainer.seq_length
    usual = parts_at(usual_length)  # known before a compiler traces the slot, which cannot trace the mesh
    number = number_of(lambda documents: parts_at(sum(documents), documents)) if _by_documents(run) else None

    def over_sequences(function: Callable[..., Tensor], *tensors: Tensor, lengths: Tensor | None = None) -> Tensor:
        if group is None:
            return function(*tensors)
        own_length = tensors[0].shape[1]
        gathered = [all_gather(x, group, 1) for x in tensors]
        if number is not None and lengths is not None:  # each sample is divided in its own way
            result = in_rank_order(function(*in_sequence_order(gathered, lengths, number)), lengths, number)
            return result.narrow(1, own * own_length, own_length)
        length = own_length * group.size()
        parts = usual if length == usual_length else parts_at(length)
        result = function(*(_in_order(x, parts) for x in gathered))
        return torch.cat([result[:, part.start : part.stop] for part in parts[own]], dim=1)

    slots = [slot.name for slot in model.declared.values() if slot.joins_sequences]
    return [Offer({slot: over_sequences}, _is_of_tokens, plugin="host") for slot in slots]


def whole_keys(run: Run, model: Model) -> list[Offer]:
    """The supplier of slots that gather positions: along the axes that divide the entries of micro batches.

    Collective: all ranks make the process group here, including ranks whose stage has no such slot.
    """
    axes = [axis.name for axis in run.mesh.views["dense"] if TOKENS_AXIS in axis.entries]
    if not model.plan.buffers or not axes:
        return []
    group = run.group(*axes)
    mesh, ranks = run.mesh, list(run.mesh.group(run.rank, *axes))  # a compiler cannot trace what computes these ranks
    own = ranks.index(run.rank)

    def parts_at(length: int, documents: tuple[int, ...] = ()) -> list[list[range]]:
        return [parts_of(mesh, rank, length, by_entries=True, documents=documents) for rank in ranks]

    usual_length = run.config.trainer.seq_length
    usual = parts_at(usual_length)  # known before a compiler traces the slot, which cannot trace the mesh
    number = number_of(lambda documents: parts_at(sum(documents), documents)) if _by_documents(run) else None

    def gathered(q: Tensor, k: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor, tuple[tuple[int, int], ...]]:
        length = k.shape[1] * len(ranks)
        parts = usual if length == usual_length else parts_at(length)
        intervals = tuple((part.start, part.stop) for part in parts[own])
        if group is None:
            return q, k, intervals
        if number is None or lengths is None:
            return q, _in_order(all_gather(k, group, 1), parts), intervals
        # Each sample is divided in its own way: the rank takes the positions that it has of samples without documents.
        q, k = in_sequence_order([all_gather(x, group, 1) for x in (q, k)], lengths, number)
        return torch.cat([q[:, first:end] for first, end in intervals], dim=1), k, intervals

    slots = [slot.name for slot in model.declared.values() if slot.gathers_positions]
    return [Offer({slot: gathered}, _has_tokens, plugin="host") for slot in slots]


def _has_tokens(site: Site, run: Run) -> bool:
    """Whether ranks divide the keys of a site: a segment of a stream is whole on one rank, so its default is right."""
    return site.sequence == TOKENS_AXIS


def _is_of_tokens(site: Site, run: Run) -> bool | str:
    if site.sequence == TOKENS_AXIS:
        return True
    return f"it gathers the positions of tokens, and the rows of this unit lie along '{site.sequence}'"


def _by_documents(run: Run) -> bool:
    """Whether ranks divide each sample by its documents, so that their positions differ from sample to sample."""
    return any(isinstance(axis.entries.get(TOKENS_AXIS), DocumentMap) for axis in run.mesh.views["dense"])


def _in_order(gathered: Tensor, parts: list[list[range]]) -> Tensor:
    """gathered [B, R S, ...], in rank order -> the same positions in sequence order."""
    pieces, start = {}, 0
    for part in (part for of_rank in parts for part in of_rank):
        pieces[part.start] = gathered[:, start : start + len(part)]
        start += len(part)
    return torch.cat([pieces[first] for first in sorted(pieces)], dim=1)


def parts_of(
    mesh: Mesh, rank: int, length: int, by_entries: bool = False, documents: tuple[int, ...] = ()
) -> list[range]:
    """The positions of a rank in a sequence of a length, as intervals in the order in which the rank holds them.

    Axes that divide entries cut first, the slowest axis first, then those that divide activations, into equal parts,
    unless only the parts `by_entries` are wanted. `documents` are the lengths of those in the sequence; without them,
    a `DocumentMap` cuts as for samples without documents.
    """
    held = [range(length)]
    dense = [axis for axis in mesh.views["dense"] if axis.divides(TOKENS_AXIS)]
    dense = [axis for axis in dense if TOKENS_AXIS in axis.entries or not by_entries]
    for axis in sorted(dense, key=lambda axis: TOKENS_AXIS not in axis.entries):
        size, index = sum(map(len, held)), mesh.index(rank, axis.name)
        if TOKENS_AXIS in axis.entries:
            of_entries = axis.entries[TOKENS_AXIS]
            if isinstance(of_entries, DocumentMap) and documents:
                cut = of_entries.divide(documents, axis.size)[index]
            else:
                cut = of_entries(size, axis.size, index)
        else:
            each = size // axis.size
            cut = (range(index * each, (index + 1) * each),)
        held = [interval for part in cut for interval in _within(held, part)]
    return held


def _within(held: list[range], part: range) -> list[range]:
    """The intervals of the places `part` among the positions of `held`, concatenated."""
    assert part.step == 1, "the index maps of sequences are made of intervals"
    found, start = [], 0
    for interval in held:
        first, last = max(part.start - start, 0), min(part.stop - start, len(interval))
        if first < last:
            found.append(interval[first:last])
        start += len(interval)
    return found
