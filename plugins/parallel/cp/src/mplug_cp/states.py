"""Scans and short convolutions over a divided sequence: intervals pass states on, in a prefix over all of them.

B batch, L positions of an interval, N intervals of a rank, R ranks, H value heads, K key width, V value width,
C channels, W width of a convolution.

A scan over an interval maps its start state affinely to its end state, S -> M S + U with M [K, K] and U [K, V], and so
it does with the output. One scan computes both maps: the values get K further columns of zeros, and the start state is
[0 | 1]. Its end state is [U | M], and the last K columns of its output are what a start state is multiplied by.

    gather     the maps of all intervals   [N, B, H, K, V + K] -> [R N, B, H, K, V + K]
    compose    the start state of every interval, on every rank (R N small products)
    add        output + (last K columns) (start state)

The message does not grow with the length of the sequence. The dual of the gather sums and scatters the gradients of the
maps. A convolution gathers the last W - 1 rows of all intervals. If ranks divide samples by their documents, they
redistribute the rows first (`redistribution.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

import mplug_ops as ops
from mplug import Run, Site, Wrap
from mplug_cp.intervals import Division, cut, distance_in_document, division, joined, lengths_of
from mplug_cp.redistribution import Core, in_zigzag
from mplug_nn import ConvolutionSpec, MixerInputs, ScanSpec
from mplug_nn.mixers.specification import CONVOLUTIONS, SCANS, STATES

if TYPE_CHECKING:
    from mplug_cp.config import ContextParallelConfig

SPECS = {"Scan.core": ScanSpec, "Convolution.core": ConvolutionSpec}
"""The slots of which this plugin passes states on, with the type of the attribute `spec` of their modules."""


def around_mixers(run: Run, config: "ContextParallelConfig") -> list[Wrap]:
    """The wraps of scans and convolutions, for all axes of context parallelism together."""
    axes = [axis.name for axis in run.mesh.views["dense"] if axis.shares_streams and axis.size > 1]
    if not axes:
        return []
    shared = division(run.mesh, run.rank, axes), run.mesh.number(run.rank, axes), run.group(*axes)
    wraps: dict[str, tuple[Callable[[Core], Core], frozenset[str]]] = {
        "Scan.core": (partial(_scan, *shared), SCANS),
        "Convolution.core": (partial(_convolution, *shared), CONVOLUTIONS),
    }
    needs, note = frozenset({STATES}), "states"
    if config.divide == "documents":
        note = "states, redistributed"
        wraps = {slot: (partial(_by_documents, shared[2], config, wrap), of) for slot, (wrap, of) in wraps.items()}
    return [
        Wrap(slot, wrap, 50, needs, _divides, note=note, serves=serves - needs)
        for slot, (wrap, serves) in wraps.items()
    ]


def _by_documents(group: ops.Group, config: "ContextParallelConfig", wrap: Callable[[Core], Core], inner: Core) -> Core:
    return in_zigzag(group, config.equal_length, wrap(inner))


def passes_states(module: object) -> bool:
    """Whether the tokens that a module mixes are mixed in a slot of which this plugin passes states on."""
    return isinstance(getattr(module, "spec", None), tuple(SPECS.values()))


def _divides(site: Site, run: Run) -> bool:
    """Whether the rows of a site are divided; the slot of another package may have the same name."""
    return site.sequence == "sequence" and isinstance(getattr(site.module, "spec", None), SPECS[site.slot])


def _scan(divided: Division, index: int, group: ops.Group, inner: Core) -> Core:
    """Wrap a core over a whole sequence into a core over the intervals of one rank."""
    if group is None:  # no processes yet: the core is never called
        return inner
    count, own, places = divided.per_rank, divided.held[index], divided.places

    def core(
        q: Tensor, k: Tensor, v: Tensor, decay: Tensor, write: Tensor | None, spec: ScanSpec, inputs: MixerInputs
    ) -> tuple[Tensor, None]:
        """The arguments of `Scan.core`, for a rank's part of the sequence -> (y [B, N L, H, V], None)."""
        lengths, width, height = inputs.document_lengths, v.shape[-1], k.shape[-1]
        length, samples = v.shape[1] // count, v.shape[0]
        q, k, v, decay = (cut(x, count) for x in (q, k, v, decay))
        write = None if write is None else cut(write, count)
        wide = torch.promote_types(v.dtype, torch.float32)
        identity = pad(torch.eye(height, dtype=wide, device=v.device), (width, 0))  # [K, V + K]
        start = identity.expand(v.shape[0], v.shape[2], -1, -1)
        whole = replace(spec, value_width=width + height, states=True)
        given = MixerInputs(lengths_of(lengths, own, length), start)
        y, maps = inner(q, k, pad(v, (0, height)), decay, write, whole, given)
        assert maps is not None, "the site's supplier offers 'states'"
        gathered = ops.gather(maps.unflatten(0, (count, samples)), group, 0)
        begins = _start_states(gathered, places, lengths, width, length)[list(own)].flatten(0, 1)  # [N B, H, K, V]
        alone, reading = y.split((width, height), dim=-1)
        y = alone + torch.einsum("blhk,bhkv->blhv", reading.to(wide), begins).to(v.dtype)
        return joined(y, count), None

    return core


def _start_states(gathered: Tensor, places: list[int], lengths: Tensor | None, width: int, length: int) -> Tensor:
    """The start states [R N, B, H, K, V] of all intervals in sequence order, from the maps of all ranks.

    Every rank composes all of them, so that the gather is a part of every rank's backward.
    """
    state = torch.zeros_like(gathered[0, ..., :width])
    states = [state]
    for number, place in enumerate(places[:-1], start=1):
        added, factor = gathered[place].split((width, gathered.shape[-1] - width), dim=-1)
        state = factor @ state + added
        if lengths is not None:  # zero if the next interval begins with a document
            continues = distance_in_document(lengths, number * length) > 0
            state = torch.where(continues[:, None, None, None], state, 0.0)
        states.append(state)
    return torch.stack(states)


def _convolution(divided: Division, index: int, group: ops.Group, inner: Core) -> Core:
    """Wrap a convolution over a whole sequence into one over the intervals of one rank."""
    if group is None:  # no processes yet: the core is never called
        return inner
    count, own, places = divided.per_rank, divided.held[index], divided.places

    def core(
        x: Tensor, weight: Tensor, bias: Tensor | None, spec: ConvolutionSpec, inputs: MixerInputs
    ) -> tuple[Tensor, None]:
        """The arguments of `Convolution.core`, for a rank's part of the sequence -> (y [B, N L, C], None)."""
        lengths, length, earlier = inputs.document_lengths, x.shape[1] // count, spec.width - 1
        rows = cut(x, count)
        last = min(earlier, length)  # intervals may be shorter than what a position sees
        gathered = ops.gather(rows[:, length - last :].unflatten(0, (count, -1)), group, 0)
        ends = pad(torch.cat([gathered[place] for place in places], dim=1), (0, 0, earlier, 0))
        before = []
        for number in own:
            halo = ends[:, number * last : number * last + earlier]
            if lengths is not None:
                distances = torch.arange(earlier, 0, -1, device=x.device)
                halo = halo.masked_fill(
                    (distances > distance_in_document(lengths, number * length)[:, None])[..., None], 0.0
                )
            before.append(halo)
        given = MixerInputs(lengths_of(lengths, own, length), torch.cat(before))
        y, _ = inner(rows, weight, bias, replace(spec, states=True), given)
        return joined(y, count), None

    return core
