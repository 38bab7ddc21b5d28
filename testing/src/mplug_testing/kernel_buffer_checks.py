"""Checks the buffers that a supplier of products declares: what it writes, and whether parts of a step combine.

B batch, S sequence, I in, O out. Under a layout a rank has a part of some of these dimensions. So the statistics of the
whole must follow from those of its parts, by the declared axes and reductions.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any
from warnings import catch_warnings

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mplug.layout.plan import Init, Parameter, axes_of
from mplug.model.slots.declaration import slot_of
from mplug.model.slots.offers import Offer, Site
from mplug.model.slots.slot_buffer import SlotBuffer
from mplug_compile.tracer import prepare_compiler
from mplug_nn import Linear, Narrow, Operand, Sink, Weights
from mplug_nn.grouped import apply_grouped
from mplug_nn.linear import PLAIN
from mplug_nn.prologue import FUSED_SLOTS, NORM_PRODUCT
from mplug_products import HeldBuffers, updated
from mplug_products.slot_buffers import hold
from mplug_testing.fused import FusedLinear
from mplug_testing.grouped import EXPERTS, PRODUCT, WEIGHTS, after_groups, expert_site, of_weight, routed
from mplug_testing.kernel_cases.dense import with_weight
from mplug_testing.kernel_checks import initial

SLOTS = ("Linear.product", "Linear.gemm", *FUSED_SLOTS, PRODUCT)
OUTPUTS, INPUTS = "mlp", "embed"
SIZES = {"batch": 4, "sequence": 6, INPUTS: 16, OUTPUTS: 32, "expert": EXPERTS}
Part = Mapping[str, slice]
"""Named axis -> the range that a rank has; the whole, if it is left out."""
Buffers = dict[str, Tensor]
WHOLE: Part = {}
MUCH = 1e4
"""More than any operand or its sum over a step, so that it shows if a supplier reads a statistic early."""


def site_of(slot: str, outputs: int, inputs: int) -> Site:
    """A site of a linear layer or of experts, as a model has it."""
    if slot == PRODUCT:
        return expert_site(inputs, outputs)
    with torch.device("meta"):
        layer = Linear(inputs, outputs, bias=False)
    weight = Parameter((OUTPUTS, INPUTS), Init("normal"))
    return Site("blocks.*.part", slot, layer, "blocks.0.part", parameters={"weight": weight})


@dataclass(frozen=True)
class BufferTrial:
    """The buffers of one slot of an offer in one dtype; `where` describes it. Each fault is a sentence, or empty.

    `kind` is that of the prologue of a fused slot, or the weight of experts ('up', 'down').
    """

    offer: Offer
    slot: str
    dtype: torch.dtype
    device: str
    where: str
    kind: str = ""

    def fault(self, compiles: bool) -> str:
        """The first fault of the declaration, or of what the supplier writes."""
        checks: list[Callable[[], str]] = [
            self._undeclared,
            self._unwritten,
            self._repeated,
            self._written_states,
            self._early_values,
            self._of_recomputation,
            self._of_micro_batches,
            *(partial(self._of_parts, axis) for axis in self._axes),
            *([self._compiled] if compiles else []),
            self._of_step_ended,
        ]
        return next((f"{self.where}: {fault}" for check in checks if (fault := check())), "")

    # Calls.

    @property
    def _axes(self) -> Iterator[str]:
        """The axes that ranks may divide."""
        unlike = {(NORM_PRODUCT, INPUTS), *((slot, "expert") for slot in SLOTS if slot != PRODUCT)}
        return (axis for axis in SIZES if (self.slot, axis) not in unlike)

    @property
    def _weight(self) -> str:
        return self.kind or "up"

    @cached_property
    def _operands(self) -> dict[str, tuple[tuple[str, ...], Tensor]]:
        """The input, the weight and the upstream gradient, with their axes; every index has another magnitude."""
        weight: tuple[str, ...] = WEIGHTS[self._weight] if self.slot == PRODUCT else (OUTPUTS, INPUTS)
        axes = {"x": ("batch", "sequence", weight[-1]), "weight": weight, "y": ("batch", "sequence", weight[-2])}
        found: dict[str, tuple[tuple[str, ...], Tensor]] = {}
        for seed, (name, dims) in enumerate(axes.items()):
            drawn = torch.randn([SIZES[dim] for dim in dims], generator=torch.Generator().manual_seed(seed))
            for number, dim in enumerate(dims):
                shape = [-1 if other == number else 1 for other in range(len(dims))]
                drawn = drawn * torch.linspace(1, 4, SIZES[dim]).view(shape)
            found[name] = dims, drawn.to(self.device, self.dtype)
        return found

    def _declared(self, part: Part = WHOLE) -> Mapping[str, SlotBuffer]:
        outputs, inputs = (len(range(*part.get(axis, slice(None)).indices(SIZES[axis]))) for axis in (OUTPUTS, INPUTS))
        return self.offer.buffers(site_of(self.slot, outputs, inputs))

    def _fresh(self, part: Part = WHOLE) -> Buffers:
        return initial(self._declared(part), self.dtype, self.device)

    @property
    def _statistics(self) -> dict[str, SlotBuffer]:
        own = f"{self._weight}_" if self.slot == PRODUCT else ""
        return {name: one for name, one in self._declared().items() if one.over and name.startswith(own)}

    def _call(self, buffers: Buffers, part: Part = WHOLE, around: Any = None) -> list[Tensor]:
        """Forward and backward of a part, which write to `buffers`: the output and both gradients."""
        x, weight, upstream = (
            tensor[tuple(part.get(dim, slice(None)) for dim in dims)].clone()
            for dims, tensor in self._operands.values()
        )
        x, weight = x.requires_grad_(), weight.requires_grad_()
        if self.slot == PRODUCT:
            return self._of_experts(x, weight, upstream, buffers, part, around)
        layer = with_weight(weight.shape[1], weight.shape[0], weight, slot=self.slot, kind=self.kind)
        setattr(layer, self.slot.rpartition(".")[2], self.offer.suppliers[self.slot])
        hold(layer, slot_of(layer, self.slot), buffers)
        y = layer(x) if around is None else around(layer)(x)
        return [y.detach(), *torch.autograd.grad(y, (x, weight), upstream)]

    def _of_experts(
        self, x: Tensor, weight: Tensor, upstream: Tensor, buffers: Buffers, part: Part, around: Any
    ) -> list[Tensor]:
        product, held, own = self.offer.suppliers[self.slot], Weights(weight), of_weight(buffers, self._weight)
        tokens, counts = (one.to(self.device) for one in routed(part, SIZES["batch"], SIZES["sequence"]))
        rows, grad = (after_groups(one.flatten(0, 1).index_select(0, tokens)) for one in (x, upstream))

        def layer(rows: Tensor) -> Tensor:
            return apply_grouped(product, rows, counts, held, buffers=own)

        y = layer(rows) if around is None else around(layer)(rows)
        return [y.detach()[: len(tokens)], *torch.autograd.grad(y, (x, weight), grad)]

    def _after(self, *parts: Part, around: Any = None) -> Buffers:
        """The buffers after the passes of parts, which share them."""
        buffers = self._fresh(parts[0])
        for part in parts:
            self._call(buffers, part, around)
        return buffers

    @cached_property
    def _whole(self) -> Buffers:
        return self._after(WHOLE)

    def _next_states(self) -> Buffers:
        """Fresh buffers, with the states that a step leaves."""
        return self._fresh() | {name: new[0] for name, new in self._updated([self._whole]).items()}

    # What a supplier writes.

    def _undeclared(self) -> str:
        buffers = self._fresh()
        _, x = self._operands["x"]
        _, weight = self._operands["weight"]
        _, upstream = self._operands["y"]
        supplier: Any = self.offer.suppliers[self.slot]
        if self.slot == PRODUCT:
            own = of_weight(buffers, self._weight)
            before = set(own)
            tokens, counts = (one.to(self.device) for one in routed(WHOLE, SIZES["batch"], SIZES["sequence"]))
            rows, grad = (one.flatten(0, 1).index_select(0, tokens) for one in (x, upstream))
            ends = counts.cumsum(0).to(torch.int32)
            operand = Operand(weight, supplier.cast(weight, own))
            _, saved = supplier.forward(rows, operand, ends, own)
            _, wanted = supplier.dgrad(grad, operand, saved, ends, own, True)
            sink = Sink(torch.zeros_like(weight), torch.ones((), dtype=torch.bool, device="cpu"))
            supplier.wgrad(wanted, sink, ends, own)
            buffers |= {f"{self._weight}_{name}": one for name, one in own.items() if name not in before}
        elif self.slot in FUSED_SLOTS:
            layer = FusedLinear(x.shape[-1], len(weight), self.slot, self.kind)
            layer.parts_once(supplier, (x, weight, upstream), buffers)
        elif self.slot == "Linear.product":
            operand = Operand(weight, supplier.cast(weight, buffers))
            _, saved = supplier.forward(x, operand, Narrow(), buffers)
            _, operands = supplier.dgrad(upstream, operand, saved, Narrow(), buffers, True)
            supplier.wgrad(operands, None, Narrow(), buffers)
        else:
            calls = (
                (supplier.forward, PLAIN.forward, (x, weight)),
                (supplier.dgrad, PLAIN.dgrad, (upstream, weight)),
                (supplier.wgrad, PLAIN.wgrad, (upstream, x, None)),
            )
            for product, default, arguments in calls:
                if product is not default:
                    product(*arguments, buffers=buffers)
        added = sorted(buffers.keys() - self._declared().keys())
        return (
            f"a pass adds '{added[0]}' to its buffers, where it is lost; declare it in Offer.buffers" if added else ""
        )

    def _unwritten(self) -> str:
        fresh = self._fresh()
        unwritten = [name for name in self._statistics if torch.equal(fresh[name], self._whole[name])]
        return f"no pass writes the statistic '{unwritten[0]}'; remove it from Offer.buffers" if unwritten else ""

    def _written_states(self) -> str:
        for buffers in (self._fresh(), self._next_states()):
            before = {name: value.clone() for name, value in buffers.items() if name not in self._statistics}
            self._call(buffers)
            changed = [name for name, value in before.items() if not _same(buffers[name], value)]
            if changed:
                return (
                    f"a pass changes the state '{changed[0]}', so results depend on the order of micro batches; "
                    f"collect a statistic, and change states in Offer.step_ended"
                )
        return ""

    def _early_values(self) -> str:
        for states in (self._fresh(), self._next_states()):
            late = {n: value + MUCH if n in self._statistics else value.clone() for n, value in states.items()}
            results, others = self._call(states), self._call(late)
            if not all(map(_same, results, others)):
                return (
                    "results depend on a statistic before the step ends, so they depend on the micro batches and ranks "
                    "of the layout; use states, which Offer.step_ended changes"
                )
        return ""

    def _repeated(self) -> str:
        """State outside of the buffers shows in a second call that begins with equal buffers."""
        results, others = self._call(self._next_states()), self._call(self._next_states())
        if not all(map(_same, results, others)):
            return (
                "a call with equal operands and equal buffers gives other results the second time: the supplier keeps "
                "state outside of its buffers; declare it in Offer.buffers"
            )
        return ""

    def _of_recomputation(self) -> str:
        hint = "write it by operators that do nothing when backward repeats a forward pass (mplug_nn.count, keep_max)"
        return self._differing(self._after(WHOLE, around=_recomputing), "with recomputation", hint)

    # How parts combine.

    def _of_micro_batches(self) -> str:
        found = self._after(*_halves("batch"))
        hint = "a step must give the same values however it is divided into micro batches"
        return self._differing(found, "after two micro batches", hint)

    def _of_parts(self, axis: str) -> str:
        """Parts of an axis on two ranks: concatenated, reduced, or equal, as declared."""
        first, second = (self._after(part) for part in _halves(axis))
        joined = {}
        for name, one in self._statistics.items():
            if axis in axes_of(one.dims):
                joined[name] = torch.cat((first[name], second[name]), dim=_dim_of(one, axis))
            elif axis in one.over:
                combine = torch.add if one.reduction == "sum" else torch.maximum
                joined[name] = combine(first[name], second[name])
            elif not self._close(first[name], second[name]):
                return f"'{name}' depends on the part of the {axis} that a rank has; add '{axis}' to its `over`"
            else:
                joined[name] = first[name]
        hint = "check its `over` and its reduction"
        return self._differing(joined, f"from the values of two ranks that divide the {axis}", hint)

    def _compiled(self) -> str:
        prepare_compiler()
        torch.compiler.reset()
        try:
            with catch_warnings(action="ignore"):  # warnings of torch's tracer do not concern the supplier
                found = self._after(WHOLE, around=lambda call: torch.compile(call, backend="aot_eager", fullgraph=True))
        finally:
            torch.compiler.reset()
        hint = "write it by an operator that names it in mutates_args (mplug.tensors.operator)"
        return self._differing(found, "in a compiled unit", hint)

    def _differing(self, found: Buffers, how: str, hint: str) -> str:
        for name, one in self._statistics.items():
            if found[name].shape != self._whole[name].shape or not self._close(found[name], self._whole[name]):
                return (
                    f"{how}, the {one.reduction} '{name}' is {_shown(found[name])}; in one pass over everything it is "
                    f"{_shown(self._whole[name])}; {hint}"
                )
        return ""

    def _close(self, one: Tensor, other: Tensor) -> bool:
        allowed = 16 * torch.finfo(self.dtype).eps * float(other.abs().max())
        return bool(((one - other).abs() <= allowed).all())

    # The end of a step.

    def _updated(self, sites: list[Buffers]) -> Mapping[str, Tensor]:
        if self.offer.step_ended is None:
            return {}
        held = HeldBuffers(site_of(self.slot, SIZES[OUTPUTS], SIZES[INPUTS]), self.offer, self._declared())
        return updated(held, {name: torch.stack([own[name] for own in sites]) for name in self._declared()})

    def _of_step_ended(self) -> str:
        other = {name: 2 * value for name, value in self._whole.items()}
        before = [dict(_copies(self._whole)), dict(_copies(other))]
        both, first, second = self._updated([self._whole, other]), *(self._updated([own]) for own in before)
        if any(not _same(value, torch.cat((first[name], second[name]))) for name, value in both.items()):
            return "step_ended mixes the sites of a role; dimension 0 of its arguments are sites, which are independent"
        if self.offer.step_ended is not None:
            stacked = {name: value[None].clone() for name, value in self._whole.items()}
            self.offer.step_ended(stacked)
            if any(not _same(value[0], self._whole[name]) for name, value in stacked.items()):
                return "step_ended changes its arguments; it must return the new values"
        return ""


def _halves(axis: str) -> tuple[Part, Part]:
    middle = SIZES[axis] // 2
    return {axis: slice(0, middle)}, {axis: slice(middle, None)}


def _dim_of(one: SlotBuffer, axis: str) -> int:
    return next(number for number, dim in enumerate(one.dims) if axis in axes_of([dim]))


def _recomputing(call: Any) -> Any:
    return lambda x: checkpoint(call, x, use_reentrant=False)


def _copies(buffers: Buffers) -> Iterator[tuple[str, Tensor]]:
    return ((name, value.clone()) for name, value in buffers.items())


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other)


def _shown(value: Tensor) -> str:
    return f"{float(value):.6g}" if value.numel() == 1 else f"a tensor of norm {float(value.norm()):.6g}"
