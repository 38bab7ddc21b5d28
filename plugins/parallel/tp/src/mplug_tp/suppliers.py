"""The suppliers and wraps of tensor parallelism. B batch, S sequence, D embed, R ranks of tp.

site                                   with sequence parallelism         without
column-parallel linear, before it      gather  [B, S/R, D] -> [B, S, D]  copy    [B, S, D] -> [B, S, D]
row-parallel linear, after it          scatter [B, S, D] -> [B, S/R, D]  reduce  [B, S, D] -> [B, S, D]
vocabulary-parallel embedding, after   scatter [B, S, D] -> [B, S/R, D]  reduce  [B, S, D] -> [B, S, D]
any other embedding                    look up this rank's positions     -
dropout in the residual stream         use this rank's positions         -
embedding of the rows of a stream      use this rank's rows              -
join of such rows with tokens          gather the rows, for this rank's  -
                                       positions
scores of an objective                 join    [B, S/R, C] -> [B, S, C]  -
norm over heads of several ranks       add the ranks' sums of squares    the same

With `overlap`, `product.py` also supplies the products of these linears as a whole (`Linear.product`). They do the work
of gather and scatter, or of copy and reduce, chunk by chunk.

In backward, gather and scatter are each other's dual, and so are copy and reduce (`mplug_ops`).
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

import mplug_ops as ops
from mplug import Model, Offer, Run, Site, Wrap
from mplug_nn import AttentionCore, AttentionInputs, AttentionSpec, Collective, PackedHeads, packed_heads_of
from mplug_nn.embedding import lookup
from mplug_nn.loss import CAPPED, WEIGHTED
from mplug_nn.specification import KNOWN
from mplug_tp.boundary import SEQUENCE, boundary
from mplug_tp.chunked import RANKS, name_for
from mplug_tp.product import OVERLAPPED
from mplug_tp.vocabulary import VocabularyParallel


def offers(run: Run, model: Model, sequence_parallel: bool, overlap: bool, chunks: str = RANKS) -> list[Offer | Wrap]:
    """All offers and wraps of tensor parallelism for this run."""
    group, index = run.group("tp"), run.mesh.index(run.rank, "tp")
    around = boundary(group, sequence_parallel, name_for(group, sequence_parallel, chunks) if overlap else "")
    sizes = _vocab_sizes(model)
    vocabulary = VocabularyParallel(group, next(iter(sizes.values()), None))

    def enter(x: Tensor) -> Tensor:
        return ops.gather(x, group, SEQUENCE) if sequence_parallel else ops.copy(x, group)

    def leave(y: Tensor) -> Tensor:
        return ops.scatter(y, group, SEQUENCE) if sequence_parallel else ops.reduce(y, group)

    def look_up_tokens(indices: Tensor, weight: Tensor) -> Tensor:
        return leave(vocabulary.lookup(indices, weight))

    def split_either_way(site: Site, _: Run) -> bool:
        return not site.needs and dim_of_tp(model, f"{site.name}.weight") is not None

    product = Offer({"Linear.product": OVERLAPPED}, split_either_way, note=_overlap, fallback=True)
    return [
        Offer({"Linear.gather": Collective(enter, boundary=around)}, _weight_split_along(0, model)),
        Offer({"Linear.scatter": Collective(leave, boundary=around)}, _weight_split_along(1, model)),
        Offer({"Embedding.lookup": look_up_tokens}, _weight_split_along(0, model)),
        _sums_of_groups(group, run.mesh.axes["tp"].size, index),
        Wrap("Attention.core", partial(_with_global_heads, index), layer=100, serves=KNOWN, streams=True),
        *([product] if overlap else ()),
        *(offer for size in sorted({*sizes.values()}) for offer in _of_losses(group, sizes, size)),
        *(_of_own_part(model, group) if sequence_parallel else ()),
    ]


def _weight_split_along(dim: int | None, model: Model) -> Callable[[Site, Run], bool]:
    return lambda site, _: dim_of_tp(model, f"{site.name}.weight") == dim


def _sums_of_groups(group: ops.Group, size: int, index: int) -> Offer:
    """The sums of squares of groups of heads that several ranks share."""

    def divides_groups(site: Site, _: Run) -> bool:
        return bool(size > site.module.num_groups)

    def squares_of_group(squares: Tensor, num_groups: int) -> Tensor:
        """[B, S, 1, 1] -> [B, S, 1, 1]: the sum over the ranks that share a group, which are consecutive."""
        sharers = size // num_groups
        first = index // sharers * sharers
        return ops.gather(squares, group, -1)[..., first : first + sharers].sum(dim=-1, keepdim=True)

    return Offer({"Mamba2.squares": squares_of_group}, divides_groups)


def _of_losses(group: ops.Group, sizes: dict[str, int], size: int) -> list[Offer]:
    """The losses over a vocabulary of a size that ranks divide."""

    def has_size(site: Site, _: Run) -> bool:
        return _size_at(sizes, site) == size

    vocabulary = VocabularyParallel(group, size)
    return [
        Offer({"Loss.cross_entropy": vocabulary.cross_entropy}, has_size, serves={CAPPED, WEIGHTED}),
        Offer({"Loss.log_probabilities": vocabulary.log_probabilities}, has_size, serves={CAPPED}),
        Offer({"Loss.divergence": vocabulary.divergence}, has_size, serves={CAPPED}),
        Offer({"Loss.top_divergence": vocabulary.top_divergence}, has_size, serves={CAPPED}),
        Offer({"Loss.top_probabilities": vocabulary.top_probabilities}, has_size, serves={CAPPED}),
    ]


def _of_own_part(model: Model, group: ops.Group) -> list[Offer]:
    """What needs the positions or rows of this rank's part of the sequence, or those of all ranks."""

    def own_positions(positions: Tensor) -> Tensor:
        return ops.own_part(positions, group, SEQUENCE)

    def whole_rows(rows: Tensor) -> Tensor:
        return ops.gather(rows, group, SEQUENCE)

    def whole_positions(values: Tensor) -> Tensor:
        return ops.join(values, group, SEQUENCE)

    def look_up_positions(indices: Tensor, weight: Tensor) -> Tensor:
        return lookup(own_positions(indices), weight)

    return [
        Offer({"Embedding.lookup": look_up_positions}, _weight_split_along(None, model)),
        Offer({"Dropout.rows": own_positions}),
        Offer({"Patches.rows": own_positions}),
        Offer({"Join.gather": whole_rows}),
        Offer({"Objective.gathered": whole_positions}),
        Offer({"Join.positions": own_positions}),
    ]


def dim_of_tp(model: Model, name: str) -> int | None:
    """The dimension along which tp splits a parameter, or None."""
    placement = model.placement_of(name)
    for dim, segments in enumerate(placement.dims):
        if any(placement.splits.get(segment.axis) == "tp" for segment in segments):
            return dim
    return None


def _overlap(site: Site, run: Run) -> str:
    return "overlap"


def _vocab_sizes(model: Model) -> dict[str, int]:
    """The unpadded number of rows of each parameter whose vocabulary tp splits, by its name."""
    return {
        name: segment.count
        for name, placement in model.placements.items()
        for dim in placement.dims
        for segment in dim
        if segment.axis == "vocab" and placement.splits.get("vocab") == "tp"
    }


def _size_at(sizes: dict[str, int], site: Site) -> int:
    """The vocabulary of a loss: that of the module around it (classes, say), or else the model's."""
    around = f"{site.name.rpartition('.')[0]}."
    return next((size for name, size in sizes.items() if name.startswith(around)), next(iter(sizes.values())))


def _with_global_heads(index: int, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap an attention core so that it numbers its heads globally.

    Dropout masks and biases are functions of a head's number in the whole model. All other per-head inputs are
    parameters, which the plan has already split. Raises ValueError if an outer wrap has set `first_head` before.
    """

    def core(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        if inputs.first_head:
            raise ValueError(
                "a wrap of Attention.core outside of tensor parallelism has set `first_head`; give this wrap a layer "
                "below 100"
            )
        return inner(q, k, v, spec, inputs._replace(first_head=index * q.shape[2]))

    packed = packed_heads_of(inner)
    return core if packed is None else AttentionCore(core, packed_heads=_GlobalPackedHeads(index, packed))


class _GlobalPackedHeads(PackedHeads):
    """The packed heads of the core inside, numbered globally."""

    def __init__(self, index: int, inner: PackedHeads) -> None:
        self.index, self.inner = index, inner

    def serves(self, spec: AttentionSpec) -> bool:
        """What the core inside serves."""
        return self.inner.serves(spec)

    def attend(
        self, heads: Tensor, num_heads: int, num_kv_heads: int, spec: AttentionSpec, inputs: AttentionInputs
    ) -> Tensor:
        """heads [B, S, H + 2G, K] of this rank -> [B, S, H, K]."""
        inputs = inputs._replace(first_head=self.index * num_heads)
        return self.inner.attend(heads, num_heads, num_kv_heads, spec, inputs)
