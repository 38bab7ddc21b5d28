"""Grouped matrix products: each row is multiplied by the matrix of its group. The linear layers of experts use them.

Rows are ordered by group. M rows, e groups, I input, O output. A group may be empty, and one group may have all rows.
Rows after those of the last group are padding: their results are arbitrary, and nothing reads them.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mplug.tensors.operator import fake, operator
from mplug.tensors.sink import Operand, Sink, Weights, add_product
from mplug_nn.gemm import NOTHING
from mplug_products.delayed import Later, hand_out
from mplug_products.weight_product import WeightProduct


def grouped_linear(rows: Tensor, counts: Tensor, weights: Weights) -> Tensor:
    """Each row times the transposed matrix of its group: rows [M, I], counts [e] int64 (rows per group) -> [M, O].

    Backward adds the weights' gradient to their sink, in fp32. If torch has a kernel for the device and the dtype, the
    CPU never waits for the device.
    """
    return apply_grouped(PLAIN_GROUPED, rows, counts, weights)


class GroupedProduct(WeightProduct):
    """The content of the slot `Experts.product`; a supplier subclasses it. It is a `WeightProduct`.

    This class is the default. `ends` [e] int32 is the index after the last row of each group. `Experts` has two
    weights, so the name of a declared buffer begins with that of a weight: 'up_largest' is 'largest' in the product
    with `up`. A supplier whose products differ in their kernels alone overrides `multiply` and `add` only.
    """

    def multiply(self, rows: Tensor, values: Tensor, ends: Tensor, transposed: bool) -> Tensor:
        """rows [M, I] times the matrix of each row's group: [e, O, I] if `transposed`, else [e, I, O] -> [M, O]."""
        return grouped_product(rows, values, ends, transposed)

    def add(self, sink: Sink, grad_y: Tensor, rows: Tensor, ends: Tensor) -> None:
        """Add the weights' gradient [e, O, I] of grad_y [M, O] and rows [M, I] to the sink."""
        add_grouped_product(*sink, grad_y, rows, ends)

    def forward(
        self, rows: Tensor, weight: Operand, ends: Tensor, buffers: Mapping[str, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """rows [M, I], weights [e, O, I] -> ([M, O], the tensors that `dgrad` needs)."""
        return self.multiply(rows, weight.values, ends, True), (rows,)

    def dgrad(
        self,
        grad_y: Tensor,
        weight: Operand,
        saved: tuple[Tensor, ...],
        ends: Tensor,
        buffers: Mapping[str, Tensor],
        needs_rows: bool,
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """grad_y [M, O] -> (the gradient of the rows, None unless `needs_rows`; the operands of `wgrad`)."""
        grad_rows = self.multiply(grad_y, weight.values, ends, False) if needs_rows else None
        return grad_rows, (grad_y, *saved)

    def wgrad(self, operands: tuple[Tensor, ...], sink: Sink, ends: Tensor, buffers: Mapping[str, Tensor]) -> None:
        """Add the weights' gradient [e, O, I] to the sink, which always exists."""
        grad_y, rows = operands
        self.add(sink, grad_y, rows, ends)


PLAIN_GROUPED = GroupedProduct()


class _GroupedProduct(torch.autograd.Function):
    """A grouped product with its gradients; the weights' gradient is added directly to the gradient sink."""

    @staticmethod
    def forward(ctx, *call):  # type: ignore[no-untyped-def]  # parameters as in `mplug_nn.product`
        product, num_taps, own, rows, weight, main_grad, stale, ends, *tensors = call
        tensors = tensors[: len(tensors) - num_taps]
        operand, buffers = _arranged(product, own, weight, tensors)
        y, saved = product.forward(rows, operand, ends, buffers)
        ctx.save_for_backward(weight, ends, *saved)
        ctx.product, ctx.own, ctx.main_grad, ctx.stale, ctx.tensors = product, own, main_grad, stale, tensors
        ctx.num_taps = num_taps
        return y

    @staticmethod
    def backward(ctx, grad_y):  # type: ignore[no-untyped-def]
        weight, ends, *saved = ctx.saved_tensors
        product, needs_rows = ctx.product, ctx.needs_input_grad[3]
        operand, buffers = _arranged(product, ctx.own, weight, ctx.tensors)
        grad_rows, operands = product.dgrad(grad_y, operand, tuple(saved), ends, buffers, needs_rows)
        grad_weight = None
        if ctx.needs_input_grad[4]:
            sink = Sink(ctx.main_grad, ctx.stale)
            if ctx.main_grad is None:
                grad_weight = torch.zeros_like(weight)
                sink = Sink(grad_weight, torch.ones((), dtype=torch.bool, device="cpu"))
            product.wgrad(operands, sink, ends, buffers)
        handed_out = hand_out((ends, *operands), ctx.num_taps)
        others = (None for _ in ctx.tensors)
        return None, None, None, grad_rows, grad_weight, None, None, None, *others, *handed_out


def _arranged(product, own, weight, tensors) -> tuple[Operand, Mapping[str, Tensor]]:  # type: ignore[no-untyped-def]
    """The weights and the buffers of a call; `tensors` are the buffers, named `own`, and the weights' copies."""
    buffers = {name: tensors[number] for number, name in enumerate(own)}
    casts = tuple(tensors[len(own) :]) or product.cast(weight, buffers)
    return Operand(weight, casts), buffers


def apply_grouped(
    product: GroupedProduct,
    rows: Tensor,
    counts: Tensor,
    weights: Weights,
    casts: tuple[Tensor, ...] = (),
    later: Later | None = None,
    buffers: Mapping[str, Tensor] = NOTHING,
) -> Tensor:
    """`grouped_linear` by a product; `casts` are the results of `product.cast`, which it calls itself without them.

    With `later`, backward hands out `ends` and the operands of the weights' gradient instead of computing it.
    """
    ends = counts.cumsum(0).to(torch.int32)
    taps = () if later is None else later.taps
    values = weights.values if later is None else weights.values.detach()
    if later is not None and later.declare is not None:
        with torch.no_grad():
            operand = Operand(values, casts or product.cast(values, buffers))
            later.declare((ends, *product.operands(rows, operand, ends, buffers)))
    slots = product, len(taps), tuple(buffers)
    tensors = (*buffers.values(), *casts, *taps)
    call = (*slots, rows, values, weights.main_grad, weights.stale, ends, *tensors)
    y: Tensor = _GroupedProduct.apply(*call)  # type: ignore[no-untyped-call]
    return y


@operator("mplug::grouped_product")
def grouped_product(rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """rows [M, I] times the matrix of each row's group: weight [e, O, I] if `transposed`, else [e, I, O] -> [M, O].

    `ends` [e] int32: the index after the last row of each group.
    """
    weight = weight.contiguous()
    matrices = weight.mT if transposed else weight
    if _has_kernel(rows, matrices):
        product: Tensor = torch._grouped_mm(rows.contiguous(), matrices, offs=ends)
        return product
    result = rows.new_zeros(rows.shape[0], matrices.shape[2])
    for matrix, (start, stop) in zip(matrices, _spans(ends), strict=True):
        torch.mm(rows[start:stop], matrix, out=result[start:stop])
    return result


@fake("mplug::grouped_product")
def _(rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1] if transposed else weight.shape[2])


@operator("mplug::add_grouped_product", mutates_args=("total", "stale"))
def add_grouped_product(total: Tensor, stale: Tensor, a: Tensor, b: Tensor, ends: Tensor) -> None:
    """total [e, O, I] += aᵀ b of each group, with a [M, O] and b [M, I], as `mplug_nn.add_product` adds each.

    If `stale` (a boolean on the CPU) is true, the products overwrite total, and `stale` becomes false. A GPU kernel
    without a wider output rounds the products of one micro batch to the dtype of a and b. Their sum over micro batches
    is not rounded.
    """
    if _has_kernel(a, b):
        is_wider = total.dtype != a.dtype and _widens(a.device, a.dtype)
        a, b, wide = a.contiguous(), b.contiguous(), torch.float32 if is_wider else None
        products = torch._grouped_mm(a.t(), b, offs=ends, out_dtype=wide)
        total.copy_(products) if stale else total.add_(products)
        stale.fill_(False)
        return
    was_stale = bool(stale)
    for own, (start, stop) in zip(total, _spans(ends), strict=True):
        add_product(own, torch.tensor(was_stale), a[start:stop].t(), b[start:stop])
    stale.fill_(False)


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    """Where each group's rows begin and end, as Python integers. On a GPU the CPU waits for the device."""
    stops = ends.tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _has_kernel(a: Tensor, b: Tensor) -> bool:
    """Whether torch multiplies all groups in one launch: bf16, GPUs from sm90 on, rows of a multiple of 16 bytes."""
    if not a.is_cuda or a.dtype != torch.bfloat16 or not a.shape[0]:
        return False
    lines = (a.shape[-1], *(b.shape[1:] if b.dim() == 3 else b.shape[-1:]))
    aligned = all(length * a.itemsize % 16 == 0 for length in lines)
    return aligned and torch.cuda.get_device_capability(a.device) >= (9, 0)


def waits_for_device(dtype: torch.dtype, widths: tuple[int, ...]) -> str:
    """Why the CPU waits in a grouped product of matrices of these widths on the current GPU; empty if it does not."""
    if dtype != torch.bfloat16:
        return f"torch's grouped products compute in bf16, and the run in {str(dtype).rpartition('.')[2]}"
    if any(width * dtype.itemsize % 16 for width in widths):
        return f"torch's grouped products need widths that are multiples of 8, and these are {widths}"
    return "" if torch.cuda.get_device_capability() >= (9, 0) else "torch's grouped products need a GPU from sm90 on"


@cache
def _widens(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel can return fp32 products of narrower operands; torch has no query for it, so a call tries."""
    rows, ends = torch.zeros(16, 16, device=device, dtype=dtype), torch.full((1,), 16, device=device, dtype=torch.int32)
    try:
        torch._grouped_mm(rows.t(), rows, offs=ends, out_dtype=torch.float32)
    except (RuntimeError, ValueError):
        return False
    return True


@register_flop_formula(torch.ops.mplug.add_grouped_product)
def _flops_of_sum(total: tuple[int, ...], stale: Any, a: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Two FLOPs per multiply-add of every row, in the weights' gradients."""
    return 2 * a[0] * total[1] * total[2]


@register_flop_formula(torch.ops.mplug.grouped_product)
def _flops(rows: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Two FLOPs per multiply-add of every row."""
    return 2 * rows[0] * weight[1] * weight[2]
