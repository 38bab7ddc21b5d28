"""The adapters of a linear and of experts. A rank r, I inputs, O outputs, n pairs of A and B."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from mplug import Init, Parameter, Segment
from mplug_lora.products import down, up
from mplug_lora.targets import Dim, Pair
from mplug_nn import Dropout, Entries, Inits, Linear, LinearAdapter, Weights, boundary_of, grouped_linear

RANK = "adapter_rank"
"""The named axis of the rows of A; no strategy divides it."""
SHARED = "shared_by_experts"
"""The named axis of length 1 of an adapter that all experts share."""
TOKENS = ("batch", "sequence")
ZEROS = Init("constant", value=0.0)


def first_values(inputs: int) -> Init:
    """The initial values of A: the variance of the uniform values of arXiv 2106.09685's code, 1 / (3 I)."""
    return Init("normal", std=(3 * inputs) ** -0.5)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _squares(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """weight [O, I], a [r, I], b [O, r] -> the squared norms of the rows of W and of W + scale B A [2, O]."""
    base = (weight * weight).sum(dim=1)
    mixed = ((weight @ a.t()) * b).sum(dim=1)
    update = ((b @ (a @ a.t())) * b).sum(dim=1)
    return torch.stack((base, base + 2 * scale * mixed + scale**2 * update))


class LowRank(LinearAdapter):
    """y + scale B A x for each chosen pair of a linear (arXiv 2106.09685); an adapter of `mplug_nn.Linear`.

    `pairs` are all pairs of the linear: consecutive ranges of its outputs. `chosen` are the numbers of those that have
    an adapter. The A of all chosen pairs are one linear `a`, so the input is read once. Pair i has a linear `b{i}`.
    Their weights have the named axes of the adapted weight, so a strategy divides them in the same way. Of a
    column-parallel linear, A is whole and B is divided; of a row-parallel linear, A is divided and B is whole.
    Collectives move tensors of width n r only.
    """

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        inputs: Dim,
        pairs: Sequence[Pair],
        chosen: Sequence[int],
        width: int,
        rank: int,
        scale: float,
        dropout: float = 0.0,
        dora: bool = False,
    ) -> None:
        super().__init__()
        self.inputs, self.pairs, self.chosen = inputs, tuple(pairs), tuple(chosen)
        self.width, self.rank, self.scale = width, rank, scale
        self.lengths = tuple(pair.length for pair in pairs)  # on this rank; `set_lengths`
        self.a = Linear(width, rank * len(chosen), bias=False)
        for number in chosen:
            self.register_module(f"b{number}", Linear(rank, pairs[number].length, bias=False))
        self.dora = self.reads_weight = dora
        for number in chosen if dora else ():
            self.register_parameter(f"magnitude{number}", nn.Parameter(torch.empty(pairs[number].length)))
        self.dropout = Dropout(dropout) if dropout else None
        self.reads_pass = self.dropout is not None
        self.drawn: tuple[Tensor, Tensor] | None = None
        """The samples' keys [B] and the positions [1 or B, S] of the pass."""

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the weights."""
        ranks = tuple(Segment(RANK, self.rank) for _ in self.chosen)
        rows = ranks if len(ranks) > 1 else ranks[0]
        entries: Entries = {"a.weight": Parameter((rows, self.inputs), first_values(self.width))}
        ups = {f"b{number}.weight": Parameter((self.pairs[number].rows, RANK), ZEROS) for number in self.chosen}
        if not self.dora:
            return {**entries, **ups}
        parts = {number: self.pairs[number].rows for number in self.chosen}
        changes = {f"magnitude{n}": Parameter((dim,), ZEROS, decay=False) for n, dim in parts.items()}
        return {**entries, **ups, **changes}

    def around(self, x: Tensor, linear: Linear) -> Tensor:
        """x [..., I] -> the linear's product and the update [..., O]; with DoRA, times m / |W + scale B A| by rows.

        With DoRA and dropout, as PEFT defines it: W x + (g - 1) W dropped + g scale B A dropped, where g is
        m / |W + scale B A|. Only the changes read the dropped input, which costs a second product with W.
        """
        dropped = self._dropped(x)
        if self.dora and dropped is not x:
            change, dtype = self._magnitudes(linear), x.dtype
            update = self._update(self.a(dropped) * self.scale) * change.to(dtype)
            return linear.unadapted(x) + (change - 1).to(dtype) * linear.unadapted(dropped) + update
        if self.a.is_bare and dropped is x and x.requires_grad and x.dtype == self.a.weight.dtype:
            x, hidden = down(x, self.a, self.scale)
        else:
            hidden = self.a(dropped) * self.scale
        y = self._updated(linear.unadapted(x), hidden)
        return y * self._magnitudes(linear).to(y.dtype) if self.dora else y

    def _updated(self, y: Tensor, hidden: Tensor) -> Tensor:
        """y [..., O], hidden [..., n r] -> y plus B_i hidden_i, in the columns of each chosen pair."""
        linears = [getattr(self, f"b{number}") for number in self.chosen]
        if all(one.is_bare for one in linears) and y.dtype == hidden.dtype:
            return up(y, hidden, linears, [sum(self.lengths[:number]) for number in self.chosen])
        return y + self._update(hidden)

    def _update(self, hidden: Tensor) -> Tensor:
        """hidden [..., n r] -> B_i hidden_i [..., O], with zeros for the pairs without adapters."""
        parts = iter(hidden.split(self.rank, dim=-1))
        ups = {number: getattr(self, f"b{number}")(next(parts)) for number in self.chosen}
        rows = ups[self.chosen[0]].shape[:-1]
        found = [
            ups[number] if number in ups else hidden.new_zeros(*rows, length)
            for number, length in enumerate(self.lengths)
        ]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def _magnitudes(self, linear: Linear) -> Tensor:
        """m / |W + scale B A| by rows [O] (arXiv 2402.09353, section 4.3), and ones for the pairs without adapters.

        m is |W| plus the parameter `magnitude`, which therefore begins at zero and has no padding or layout of its own.
        The norms carry no gradient. |W + s B A|^2 = |W|^2 + 2 s W . B A + s^2 |B A|^2. Each term is a sum over inputs:
        ranks that divide the inputs add their parts, and no rank computes the product B A.
        """
        found = []
        down = iter(self.a.weight.detach().split(self.rank))
        boundary = boundary_of(linear.scatter)
        for number, weight in enumerate(linear.weight.detach().split(list(self.lengths))):
            if number not in self.chosen:
                found.append(weight.new_ones(len(weight)))
                continue
            b = getattr(self, f"b{number}").weight.detach()
            squares = _squares(_wide(weight), _wide(next(down)), _wide(b), self.scale)
            norms = (squares if boundary is None else boundary.total(squares)).sqrt()  # [2, O]
            found.append((norms[0] + getattr(self, f"magnitude{number}")) / norms[1])
        return found[0] if len(found) == 1 else torch.cat(found)

    def _dropped(self, x: Tensor) -> Tensor:
        if self.dropout is None or not self.training:
            return x
        assert self.drawn is not None, "the unit has not received the samples' keys"
        keys, positions = self.drawn
        dropped: Tensor = self.dropout(x, keys, positions)
        return dropped


class ExpertsLowRank(nn.Module):
    """y + scale B_e A_e x for each expert e; an adapter of a projection of `mplug_nn.Experts`.

    `a` [e, r, I] and `b` [e, O, r] have the named axes of the adapted weight [e, O, I]. If the experts share one
    adapter, e is 1, and no strategy divides this dimension: every rank has the adapter, and a part of its gradient.
    """

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self, dims: tuple[Dim, Dim, Dim], shape: tuple[int, int, int], rank: int, scale: float, shared: bool = False
    ) -> None:
        super().__init__()
        self.dims, self.rank, self.scale, self.shared = dims, rank, scale, shared
        experts, outputs, inputs = shape
        self.width, number = inputs, 1 if shared else experts
        self.a = nn.Parameter(torch.empty(number, rank, inputs))
        self.b = nn.Parameter(torch.empty(number, outputs, rank))

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the weights. Ranks that divide the width of an expert see parts of both gradients."""
        experts, outputs, inputs = self.dims
        over = (*TOKENS, *(("expert",) if self.shared else ()), "expert_mlp")
        first = SHARED if self.shared else experts
        return {
            "a": Parameter((first, RANK, inputs), first_values(self.width), over=over),
            "b": Parameter((first, outputs, RANK), ZEROS, over=over),
        }

    def forward(self, rows: Tensor, y: Tensor, counts: Tensor) -> Tensor:
        """rows [M, I], y [M, O], counts [e] -> [M, O]."""
        counts = counts.sum(dim=0, keepdim=True) if self.shared else counts
        hidden = grouped_linear(rows, counts, Weights.of(self.a))
        return y + self.scale * grouped_linear(hidden, counts, Weights.of(self.b))
