"""Experts: feed-forward networks; each token uses a few of them.

N tokens of this rank, D embed, E experts of the model, e experts that this rank holds, k experts chosen by a token, M
rows, F the width of an expert.
"""

import math
from collections.abc import Callable, Container, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from mplug.layout.inits import ZEROS, Entries, Inits
from mplug.layout.plan import Parameter, Segment
from mplug.model.slots.declaration import Slot
from mplug.tensors.sink import Sink, Weights
from mplug_nn.gemm import NOTHING
from mplug_nn.grouped import PLAIN_GROUPED, GroupedProduct, apply_grouped, grouped_linear, waits_for_device
from mplug_nn.linear import ADAPTERS
from mplug_nn.mlp import Activation, Kind
from mplug_products.delayed import Later, Operands, part_of
from mplug_products.slot_buffers import held
from mplug_products.weight_product import ProductModule

Route = tuple[Tensor, ...]
"""Routing metadata that `dispatch` returns and `combine` needs."""


def dispatch(
    x: Tensor, chosen: Tensor, gates: Tensor, num_experts: int, num_rows: int | None = None
) -> tuple[Tensor, Tensor, Route]:
    """Make one row for every choice of a token, ordered by expert: the default of the slot `Experts.dispatch`.

    x [N, D], chosen [N, k] int64 (an expert's number, or `num_experts` for a dropped choice), gates [N, k] -> (rows
    [M, D] in the order of the experts that this rank holds, counts [e] int64 of the rows of each expert, route). More
    rows may follow those of the last expert, with arbitrary content. Nothing may read these rows or their gradient.

    `combine` weighs by the gates. `dispatch` receives them for a supplier that computes the sums of a token's rows on
    other ranks; such a supplier puts the gates that arrive there into the route. In this default, e = E and M = N k, or
    M = `num_rows` if the caller knows that no more choices are kept (at least 1 if there are tokens).
    """
    flat = chosen.flatten()
    expert, order = flat.sort(stable=True)  # [N k]: choices in the order of their rows
    starts = torch.searchsorted(expert, torch.arange(num_experts + 1, device=x.device))
    back = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=x.device))
    order = order if num_rows is None else order.narrow(0, 0, num_rows)
    route = (order, back.view_as(chosen), starts[-1])
    rows: Tensor = _Dispatch.apply(x, *route)  # type: ignore[no-untyped-call]
    return rows, starts.diff(), route


def combine(rows: Tensor, gates: Tensor, route: Route) -> Tensor:
    """The sum of each token's rows, weighted by its gates: the default of the slot `Experts.combine`.

    rows [M, D], gates [N, k] (fp32; 0 for a dropped choice), the route that `dispatch` returned -> [N, D].
    """
    y: Tensor = _Combine.apply(rows, gates, *route)  # type: ignore[no-untyped-call]
    return y


def arrive(rows: Tensor, route: Route) -> tuple[Tensor, Route]:
    """What `dispatch` returned -> (the rows [M, D] to compute with, route): the default of the slot `Experts.arrive`.

    Rows may still travel when `dispatch` returns: then they and their gradient are undefined, and only this slot reads
    them. `Experts` calls it before it multiplies rows; in between, `MixtureOfExperts` computes its shared MLP and other
    parts of its tokens.
    """
    return rows, route


def leave(rows: Tensor, route: Route) -> tuple[Tensor, Route]:
    """What the experts computed -> (the rows [M, D] for `combine`, route): the default of the slot `Experts.leave`.

    Rows may still travel back when it returns: then they and their gradient are undefined, and only `combine` reads
    them. In between, `MixtureOfExperts` computes other parts of its tokens.
    """
    return rows, route


class _Dispatch(torch.autograd.Function):
    """rows[m] = x[order[m] // k]; backward: grad_x[n] = sum_j grad_rows[back[n, j]], without the dropped choices."""

    @staticmethod
    def forward(ctx, x, order, back, total):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(back, total)
        return x.index_select(0, order // back.shape[1])

    @staticmethod
    def backward(ctx, grad_rows):  # type: ignore[no-untyped-def]
        back, total = ctx.saved_tensors
        return _picked(grad_rows, back, total).sum(dim=1), None, None, None


class _Combine(torch.autograd.Function):
    """y[n] = sum_j gates[n, j] rows[back[n, j]]; backward: grad_rows[m] = gate of m times grad_y[order[m] // k]."""

    @staticmethod
    def forward(ctx, rows, gates, order, back, total):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(rows, gates, order, back, total)
        y = (_picked(rows, back, total) * gates[..., None]).sum(dim=1)
        # Compiled by torch 2.11, a tensor that `to` returns unchanged has a zero gradient (pytorch issue 180642).
        return y if y.dtype == rows.dtype else y.to(rows.dtype)

    @staticmethod
    def backward(ctx, grad_y):  # type: ignore[no-untyped-def]
        rows, gates, order, back, total = ctx.saved_tensors
        weight = gates.flatten().index_select(0, order)[:, None]  # [M, 1]
        grad_rows = (grad_y.index_select(0, order // back.shape[1]) * weight).to(rows.dtype)
        grad_gates = (_picked(rows, back, total).to(gates.dtype) * grad_y[:, None]).sum(dim=-1)
        return grad_rows, grad_gates, None, None, None


def _picked(rows: Tensor, back: Tensor, total: Tensor) -> Tensor:
    """rows[back] [N, k, D], with zeros for dropped choices; the rows of these follow the first `total` rows, if any."""
    picked = rows.index_select(0, back.flatten().clamp(max=rows.shape[0] - 1)).view(*back.shape, rows.shape[1])
    return torch.where((back < total)[..., None], picked, 0)


def compute(
    rows: Tensor,
    counts: Tensor,
    up: Weights,
    down: Weights,
    kind: Kind,
    activation: Callable[[Tensor, Tensor | None, Kind], Tensor],
    bias: Tensor | None = None,
    adapters: tuple[nn.Module | None, nn.Module | None] = (None, None),
) -> Tensor:
    """Apply to each row its expert: the default of the slot `Experts.compute`.

    rows [M, D], counts [e] int64, `up` [e, F, D] (gated: [e, 2F, D], gate first), `down` [e, D, F] -> [M, D]. `kind`
    is the kind of the activation, and `activation` the callable in the slot `MLP.activation`. A supplier that fuses its
    work need not call it. The weights' gradients go to their sinks. `Experts` calls this function only if it is
    wrapped; otherwise it computes the same by its slot `Experts.product`. `bias` [e, F] (gated: [e, 2F]) is added to
    the up projection at sites that need 'expert bias'; other sites do not pass it. `adapters` are those of the two
    projections at sites that need 'adapters'; other sites do not pass them.
    """
    hidden = adapted(adapters[0], rows, grouped_linear(rows, counts, up), counts)
    hidden = activation(hidden if bias is None else add_of_group(hidden, counts, bias), None, kind)
    return adapted(adapters[1], hidden, grouped_linear(hidden, counts, down), counts)


DISPATCH = Slot("Experts.dispatch", "dispatch", dispatch)
PRODUCT = Slot("Experts.product", "experts", PLAIN_GROUPED, multiplies=True, buffers=("up_", "down_"))
COMPUTE = Slot(
    "Experts.compute",
    "experts",
    compute,
    calls={"": ("MLP.activation", PRODUCT.name)},
    unless_wrapped=(PRODUCT.name,),
    composes=True,
    multiplies=True,
)
ARRIVE = Slot("Experts.arrive", "dispatch", arrive)
LEAVE = Slot("Experts.leave", "dispatch", leave)
COMBINE = Slot("Experts.combine", "dispatch", combine)


def adapted(adapter: nn.Module | None, rows: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    """The product y [M, O] of rows [M, I] with the experts' weights, or what an adapter makes of it."""
    if adapter is None:
        return y
    made: Tensor = adapter(rows, y, counts)
    return made


def add_of_group(rows: Tensor, counts: Tensor, bias: Tensor) -> Tensor:
    """rows [M, F] in the order of groups, counts [e] int64, bias [e, F] -> each row plus the bias of its group.

    Rows after those of the last group stay as they are, so that their gradients reach no bias. `len` would fail for a
    number of rows that depends on values, in a pass without memory.
    """
    number = torch.arange(rows.shape[0], device=rows.device)
    group = torch.searchsorted(counts.cumsum(0), number, right=True)  # [M]; e for the rows after the last group
    return rows + torch.cat((bias, torch.zeros_like(bias[:1]))).to(rows.dtype).index_select(0, group)


class Experts(Activation, ProductModule):
    """E feed-forward networks of the same shape.

    `num_experts` is that of the whole model, also on a rank that holds only some of the experts. `axis` is the named
    axis of the width `dim`. With `bias`, every expert has a bias of its up projection. The biases of down projections
    belong to `MixtureOfExperts`: they are added after the combination, because the rows of one expert may be partial
    sums (expert tensor parallelism).

    `up_adapter` and `down_adapter` are None, or modules that a plugin has attached (`mplug.Model.attach`). They are
    called as adapter(rows [M, I], y [M, O], counts [e]) with the product y of a projection, without bias; the result
    takes the place of y.
    """

    SLOTS: ClassVar[tuple[Slot, ...]] = (*Activation.SLOTS, DISPATCH, ARRIVE, COMPUTE, PRODUCT, LEAVE, COMBINE)
    CASTS: ClassVar[Mapping[str, str]] = {"up": "up_casts", "down": "down_casts"}
    up_casts: tuple[Tensor, ...] = ()
    down_casts: tuple[Tensor, ...] = ()
    DELAYED: ClassVar[Mapping[str, str]] = {"up": "up_later", "down": "down_later"}
    up_later: Later | None = None
    down_later: Later | None = None
    up_adapter: nn.Module | None
    down_adapter: nn.Module | None
    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self, dim: int, ffn_dim: int, num_experts: int, kind: Kind, bias: bool = False, axis: str = "embed"
    ) -> None:
        super().__init__(kind)
        self.num_experts, self.axis = num_experts, axis
        wide = ffn_dim * (2 if self.gated else 1)
        self.up = nn.Parameter(torch.empty(num_experts, wide, dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, ffn_dim))
        self.up_bias = nn.Parameter(torch.empty(num_experts, wide)) if bias else None
        self.register_module("up_adapter", None)
        self.register_module("down_adapter", None)
        self.dispatch, self.arrive, self.compute, self.leave = dispatch, arrive, compute, leave
        self.combine = combine
        self.product: GroupedProduct = PLAIN_GROUPED

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of the weights."""
        wide = Segment("expert_mlp", self.down.shape[2])
        up = (wide, wide) if self.gated else wide
        bias = {} if self.up_bias is None else {"up_bias": Parameter(("expert", up), ZEROS, decay=False)}
        return {
            "up": Parameter(("expert", up, self.axis), inits.weight),
            "down": Parameter(("expert", self.axis, wide), inits.residual),
            **bias,
        }

    def needs(self, slot: str, entries: Container[str]) -> frozenset[str]:
        """What a supplier of a slot must offer here."""
        if slot != "Experts.compute":
            return super().needs(slot, entries)
        biased = {"expert bias"} if self.up_bias is not None else set()
        return super().needs(slot, entries) | biased | ({ADAPTERS} if self.is_adapted else set())

    @property
    def is_adapted(self) -> bool:
        """Whether a projection has an adapter."""
        return self.up_adapter is not None or self.down_adapter is not None

    def waits(self, slot: str, dtype: torch.dtype) -> str:
        """Why the CPU waits for the device in the default of a slot that computes in `dtype`; empty if it does not."""
        multiplies = slot == ("Experts.product" if self.compute is compute else "Experts.compute")
        return waits_for_device(dtype, (*self.up.shape[1:], self.down.shape[2])) if multiplies else ""

    def forward(self, x: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        """x [N, D], chosen [N, k] (`num_experts`: dropped), gates [N, k] -> [N, D]."""
        return self.finish(gates, *self.work(*self.begin(x, chosen, gates)))

    def begin(self, x: Tensor, chosen: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Route]:
        """The first step of `forward`: let rows travel to their experts."""
        return self.dispatch(x, chosen, gates, self.num_experts)

    def work(self, rows: Tensor, counts: Tensor, route: Route, part: int = 0, parts: int = 1) -> tuple[Tensor, Route]:
        """The second step, with the results of `begin`: apply to each row its expert, and let the rows travel back.

        What a caller computes between two steps overlaps with the travel. A caller with several parts of tokens states
        which one the rows are of.
        """
        rows, route = self.arrive(rows, route)
        up, down = Weights.of(self.up), Weights.of(self.down)
        if self.compute is compute:
            up_later, down_later = part_of(self.up_later, part, parts), part_of(self.down_later, part, parts)
            hidden = apply_grouped(self.product, rows, counts, up, self.up_casts, up_later, self.buffers_of("up"))
            hidden = adapted(self.up_adapter, rows, hidden, counts)
            if self.up_bias is not None:
                hidden = add_of_group(hidden, counts, self.up_bias)
            hidden = self.activate(hidden)
            of_down = self.down_casts, down_later, self.buffers_of("down")
            y = apply_grouped(self.product, hidden, counts, down, *of_down)
            rows = adapted(self.down_adapter, hidden, y, counts)
        else:
            biases: tuple[Any, ...] = () if self.up_bias is None else (self.up_bias,)
            adapters: dict[str, Any] = {"adapters": (self.up_adapter, self.down_adapter)} if self.is_adapted else {}
            rows = self.compute(rows, counts, up, down, self.kind, self.activation, *biases, **adapters)
        return self.leave(rows, route)

    def finish(self, gates: Tensor, rows: Tensor, route: Route) -> Tensor:
        """The last step, with the results of `work`: the weighted sum of each token's rows."""
        return self.combine(rows, gates, route)

    def compute_later(self, weight: str, operands: Operands) -> None:
        """Add the gradient of a weight to its sink, from operands that a pass has handed out (`up_later`, ...)."""
        own, (ends, *rest) = getattr(self, weight), operands
        sink = Sink(own.main_grad, own.main_grad_stale)
        self.product.wgrad(tuple(rest), sink, ends, self.buffers_of(weight))

    def product_of(self, weight: str) -> tuple[GroupedProduct, str]:
        """One product multiplies by both weights."""
        return self.product, "Experts.product"

    def buffers_of(self, weight: str) -> Mapping[str, Tensor]:
        """The buffers of the product with a weight, without the weight's name before theirs."""
        if not self.slot_buffers:
            return NOTHING
        own, prefix = held(self, "Experts.product"), f"{weight}_"
        return {name.removeprefix(prefix): one for name, one in own.items() if name.startswith(prefix)}


Dropping = Literal["position", "probability"]


def beyond_capacity(chosen: Tensor, gates: Tensor, num_experts: int, factor: float, dropping: Dropping) -> Tensor:
    """Which choices are beyond the experts' capacity: `factor` * N k / E choices per expert, rounded up.

    chosen and gates [..., k] of N tokens -> the same shape, bool. An expert keeps the choices of the earliest tokens
    ('position', arXiv 2006.16668), or those with the highest gates ('probability'). Gates that may differ by rounding
    alone, as those of equal first tokens of documents, are equal: then the earliest tokens stay.
    """
    capacity = math.ceil(factor * chosen.numel() / num_experts)
    flat, places = chosen.flatten(), torch.arange(chosen.numel(), device=chosen.device)
    clear = (gates.flatten() / torch.finfo(gates.dtype).eps ** 0.75).round()
    first = clear.argsort(descending=True, stable=True) if dropping == "probability" else places
    expert, order = flat[first].sort(stable=True)
    starts = torch.searchsorted(expert, torch.arange(num_experts, device=chosen.device))
    number = places - starts[expert]  # of each choice, among those of its expert
    return torch.empty_like(flat, dtype=torch.bool).scatter_(0, first[order], number >= capacity).view_as(chosen)
