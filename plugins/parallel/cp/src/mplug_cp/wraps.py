"""The wraps of context parallelism around attention cores."""

from collections.abc import Callable
from functools import partial
from math import gcd, prod
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import pad

import mplug_ops as ops
from mplug import Site, Wrap
from mplug_cp.by_documents import by_documents
from mplug_cp.exchange import exchanged
from mplug_cp.gathered import gathered_of
from mplug_cp.head_chunks import chunked
from mplug_cp.operators import Operator
from mplug_cp.ring import ring_of
from mplug_cp.swaps import REMEDY, SETTING, exchange_by_copies
from mplug_nn import AttentionInputs, AttentionParts, AttentionSpec, parts_of
from mplug_nn.specification import (
    CROSS,
    DOCUMENTS,
    FULL,
    KEY_LENGTH,
    KNOWN,
    LOG_SUM_EXP,
    PARTS_BY_POSITION,
    POSITION_GROUPS,
    SINKS,
    STATIC_KEYS,
    VALUE_WIDTH,
    WINDOW,
)

if TYPE_CHECKING:
    from mplug import Run
    from mplug_cp.config import ContextParallelConfig


POSITIONED = frozenset({WINDOW, POSITION_GROUPS})
"""Needs for which parts are computed by position."""
BY_PARTS = frozenset({DOCUMENTS, FULL, VALUE_WIDTH, SINKS}) | POSITIONED
"""Needs that attention by parts serves: parts have no cap and no bias."""
CHUNKED = frozenset({DOCUMENTS, FULL, SINKS})
"""Needs that heads in chunks serve; other sites exchange all heads at once."""
BY_HEADS = KNOWN - {KEY_LENGTH, STATIC_KEYS, CROSS}
"""Needs that the exchange of heads serves: every rank computes whole heads, with as many keys as queries."""


def around_attention(run: "Run", config: "ContextParallelConfig") -> "list[Wrap]":
    """The wraps of a method, for the axes with more than one rank."""
    wraps, method = [], config.method
    if method != "ulysses" and run.mesh.axes["cp"].size > 1:
        of_documents, serves = config.divide == "documents", BY_PARTS
        operator_of = gathered_of if method == "all_gather" else ring_of
        note = "all-gather" if method == "all_gather" else "ring"
        if of_documents:
            operator_of, note = partial(by_documents, config.equal_length), "documents"
            serves = BY_PARTS - {POSITION_GROUPS}
        wrap = partial(by_parts, operator_of, run.group("cp"))
        for positioned, needs in ((False, {LOG_SUM_EXP}), (True, {LOG_SUM_EXP, PARTS_BY_POSITION})):
            supports = partial(_has_parts, positioned, of_documents)
            wraps.append(Wrap("Attention.core", wrap, 0, frozenset(needs), supports, note=note, serves=serves))
    axis = "cp" if method == "ulysses" else "cp_heads"
    if method in ("ulysses", "hierarchical") and run.mesh.axes[axis].size > 1:
        size, index = run.mesh.axes[axis].size, run.mesh.index(run.rank, axis)
        wrap = partial(exchanged, run.group(axis), size, index)
        supports, note = partial(_has_heads, axis, None), "exchange of heads"
        if config.transport == "copy_engines":
            ops.refuse_healing(run, SETTING, REMEDY)
            exchange_by_copies(run, run.group(axis))
        if config.head_chunks > 1 or config.transport == "copy_engines":
            wrap_chunks = partial(chunked, run.group(axis), size, index, config.head_chunks)
            needs, hides = frozenset({LOG_SUM_EXP}), partial(_has_heads, axis, True)
            wraps.append(
                Wrap("Attention.core", wrap_chunks, 50, needs, hides, note=f"{note} in chunks", serves=CHUNKED)
            )
            supports = partial(_has_heads, axis, False)
        wraps.append(Wrap("Attention.core", wrap, layer=50, supports=supports, note=note, serves=BY_HEADS))
    return [*wraps, *_around_joins(run)]


def _around_joins(run: "Run") -> "list[Wrap]":
    """The wrap that gathers the rows of a stream from the ranks that share its segments."""
    axes = [axis.name for axis in run.mesh.views["dense"] if axis.shares_streams and axis.size > 1]
    if not axes:
        return []
    group = run.group(*axes)

    def gathered(inner: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda rows: ops.gather(inner(rows), group, 1)

    return [Wrap(slot, gathered, layer=50) for slot in ("Join.gather", "CrossAttention.gather")]


def by_parts(
    operator_of: Callable[[AttentionParts], Operator], group: ops.Group, inner: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Replace `inner` by an attention core over a split sequence.

    `operator_of` builds the core's operator from the parts that `inner` provides.
    """
    if group is None:  # no processes yet: the core is never called
        return inner
    operator, name = operator_of(parts_of(inner)), group.group_name

    def core(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        """q [B, S/R, H, K], k [B, S/R, G, K], v [B, S/R, G, V] -> [B, S/R, H, V]; `_has_parts` has refused dropout."""
        key_width, value_width = q.shape[-1], v.shape[-1]
        # Keys and values travel in one message, and parts have one width: zeros change neither scores nor sums.
        width = max(key_width, value_width)
        if key_width != value_width:
            q, k, v = (pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        groups = inputs.position_groups if spec.causal else None  # without a causal mask, a query sees them anyway
        tensors = (q, k, v, inputs.document_lengths, groups, inputs.sinks)
        y = operator(*tensors, spec.scale, spec.causal, spec.window, name)[0]
        return y[..., :value_width]

    return core


def _has_parts(positioned: bool, of_documents: bool, site: Site, run: "Run") -> bool | str:
    """True if attention can be computed by parts, else a reason; no supplier draws dropout masks part by part.

    False for the rows of a stream, which cp does not divide, and for keys of another sequence, which every rank has;
    also if the parts of the site are not `positioned` as this wrap assumes.
    """
    if site.sequence != "sequence" or CROSS in site.needs or bool(site.needs & POSITIONED) != positioned:
        return False
    if of_documents and DOCUMENTS not in site.needs:
        return "parallel.cp.divide=documents divides packed samples, and these have no document lengths; remove it"
    if of_documents and POSITION_GROUPS in site.needs:
        return "parallel.cp.divide=documents does not support position groups; set parallel.cp.divide=sequence"
    if unserved := site.needs - BY_PARTS:
        remedy = "set parallel.cp.method=ulysses" if unserved <= BY_HEADS else "use a layout without cp"
        return f"attention that is computed by parts does not support {', '.join(sorted(unserved))}; {remedy}"
    dropout = site.module.dropout
    return (
        f"attention that is computed by parts does not support dropout, and attention dropout is {dropout:g}; set it "
        f"to 0, or set parallel.cp.method=ulysses"
        if dropout > 0
        else True
    )


def _has_heads(axis: str, in_chunks: bool | None, site: Site, run: "Run") -> bool | str:
    """Whether the ranks of an axis can exchange the heads of a site; `in_chunks`: in chunks, or all at once."""
    if site.sequence != "sequence" or CROSS in site.needs:
        return False
    if in_chunks is not None and in_chunks != (site.needs <= CHUNKED and site.module.dropout == 0):
        return False
    size = run.mesh.axes[axis].size
    heads = site.module.num_heads // prod(one.size for one in run.mesh.axes.values() if "heads" in one.splits)
    if heads % size == 0:
        return True
    fitting = [str(degree) for degree in range(1, heads + 1) if heads % degree == 0]
    degree_name, inner = "cp" if axis == "cp" else "parallel.cp.ulysses_degree", gcd(heads, size)
    both = f"parallel.cp.method=hierarchical and parallel.cp.ulysses_degree={inner}, or "
    return (
        f"{degree_name}={size} does not divide the {heads} query heads of a rank; use {' or '.join(fitting)}, "
        f"or set {both if axis == 'cp' and inner > 1 else ''}parallel.cp.method=ring"
    )
