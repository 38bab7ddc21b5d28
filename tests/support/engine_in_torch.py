"""Stand-ins for Transformer Engine's functions in plain torch, so that a CPU can check everything around them.

They follow the layouts and scales that Transformer Engine documents. Its own numbers are a GPU's to show.
N rows, I columns.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 128
NUMBERS = {torch.float8_e4m3fn: 7, torch.float8_e5m2: 8, torch.bfloat16: 6, torch.float32: 4}
DTYPES = {number: dtype for dtype, number in NUMBERS.items()}


def _limit(number: int) -> float:
    return float(torch.finfo(DTYPES[number]).max)


def _bytes(x: Tensor, scale: Tensor, number: int) -> Tensor:
    end = _limit(number)
    return (x.float() * scale).clamp(-end, end).to(DTYPES[number]).view(torch.uint8)


def _scale(largest: Tensor, number: int, power_of_two: bool) -> Tensor:
    scale = torch.where(largest > 0, _limit(number) / largest, torch.ones_like(largest))
    return torch.exp2(scale.log2().floor()) if power_of_two else scale


class _Quantizer:
    """One scale for a tensor: its own, or a given one."""

    internal = False

    def __init__(self, number: int, columns: bool, power_of_two: bool, given: tuple[Tensor, Tensor] | None) -> None:
        self.number, self.columns, self.power_of_two, self.given = number, columns, power_of_two, given
        self.dtype = number

    def quantize(self, x: Tensor) -> SimpleNamespace:
        assert self.internal
        return self.compute(x)

    def compute(self, x: Tensor) -> SimpleNamespace:
        assert x.is_contiguous()
        largest = x.float().abs().amax()
        scale = _scale(largest, self.number, self.power_of_two)
        if self.given is not None:
            scale = self.given[0]
            self.given[1].copy_(torch.maximum(self.given[1], largest))
        rows = _bytes(x, scale, self.number)
        columns = rows.t().contiguous() if self.columns else None
        return SimpleNamespace(_data=rows, _transpose=columns, _scale_inv=(1 / scale).view(1))


class _BlockQuantizer:
    """A scale for 128 consecutive numbers, or for 128 x 128."""

    internal = False

    def __init__(self, number: int, *, block_scaling_dim: int, rowwise: bool, columnwise: bool, **named: bool) -> None:
        self.number, self.square, self.wanted = number, block_scaling_dim == 2, (rowwise, columnwise)
        self.power_of_two = named["force_pow_2_scales"]

    def quantize(self, x: Tensor) -> SimpleNamespace:
        assert self.internal
        return self.compute(x)

    def compute(self, x: Tensor) -> SimpleNamespace:
        assert len(x) % BLOCK == 0
        found = [
            self._rows(part) if wanted else (None, None) for part, wanted in zip((x, x.t()), self.wanted, strict=True)
        ]
        (rows, of_rows), (columns, of_columns) = found
        return SimpleNamespace(
            _rowwise_data=rows, _rowwise_scale_inv=of_rows, _columnwise_data=columns, _columnwise_scale_inv=of_columns
        )

    def _rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        n, i = x.shape
        high = BLOCK if self.square else 1
        blocks = x.float().reshape(n // high, high, i // BLOCK, BLOCK)
        scale = _scale(blocks.abs().amax(dim=(1, 3)), self.number, self.power_of_two)  # [N or N / 128, I / 128]
        values = _bytes(blocks, scale[:, None, :, None], self.number).reshape(n, i)
        if not self.square:
            return values, (1 / scale).t().contiguous()
        inverses = torch.zeros(n // BLOCK, -(-i // BLOCK // 4) * 4)
        inverses[:, : i // BLOCK] = 1 / scale
        return values, inverses


def _values(operand: Any) -> Tensor:
    """The numbers [M, K] that an operand stands for."""
    if isinstance(operand, Tensor):
        return operand.float()
    x = operand.values.view(DTYPES[operand.number]).float()
    if operand.inverses.dim() == 1:
        return x * operand.inverses
    if operand.square:
        inverses = operand.inverses[:, : x.shape[1] // BLOCK]
        return x * inverses.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return x * operand.inverses.t().repeat_interleave(BLOCK, 1)


def _gemm(
    a: Any,
    b: Any,
    out_dtype: torch.dtype,
    layout: str = "TN",
    out: Tensor | None = None,
    accumulate: bool = False,
    use_split_accumulator: bool = False,
) -> tuple[Tensor, None, None, None]:
    left, right = _values(a), _values(b)
    found = (right.t() if layout[1] == "T" else right) @ (left.t() if layout[0] == "T" else left)
    if out is None:
        return found.to(out_dtype), None, None, None
    assert out.is_contiguous()
    assert out.dtype == out_dtype
    out.add_(found) if accumulate else out.copy_(found)
    return out, None, None, None


def _current(number: int, device: Any, *, rowwise: bool, columnwise: bool, force_pow_2_scales: bool) -> _Quantizer:
    assert rowwise
    return _Quantizer(number, columnwise, force_pow_2_scales, None)


def _delayed(scale: Tensor, largest: Tensor, number: int, *, rowwise: bool, columnwise: bool) -> _Quantizer:
    assert rowwise
    return _Quantizer(number, columnwise, False, (scale, largest))


def _operand(
    *, data: Tensor, fp8_scale_inv: Tensor, fp8_dtype: int, data_transpose: Tensor | None = None
) -> SimpleNamespace:
    found = SimpleNamespace(values=data, inverses=fp8_scale_inv, number=fp8_dtype, square=False)
    found.written = {"_data": data, "_transpose": data_transpose, "_scale_inv": fp8_scale_inv}
    return found


def _block_operand(values: Tensor, inverses: Tensor, *others: Any) -> SimpleNamespace:
    columns, of_columns, number, quantizer, square = others
    assert quantizer is None
    found = SimpleNamespace(values=values, inverses=inverses, number=number, square=square)
    of_rows = {"_rowwise_data": values, "_rowwise_scale_inv": inverses}
    found.written = {**of_rows, "_columnwise_data": columns, "_columnwise_scale_inv": of_columns}
    return found


def _quantize(x: Tensor, quantizer: Any, into: SimpleNamespace, noop: None) -> None:
    """Write to the tensors of a container."""
    assert noop is None
    assert (into.number, into.square) == (quantizer.number, getattr(quantizer, "square", False))
    found = quantizer.compute(x)
    for name, tensor in into.written.items():
        assert tensor.is_contiguous()
        assert tensor.shape == getattr(found, name).shape
        tensor.copy_(getattr(found, name))


def _padding(x: Tensor, whole: Tensor, counts: list[int], with_padding: list[int]) -> None:
    """Groups of rows with rows of zeros after each."""
    assert (len(x), len(whole)) == (sum(counts), sum(with_padding))
    for part, into in zip(x.split(counts), whole.split(with_padding), strict=True):
        into.zero_()[: len(part)] = part


def _unpadding(whole: Tensor, x: Tensor, with_padding: list[int], counts: list[int]) -> None:
    assert (len(x), len(whole)) == (sum(counts), sum(with_padding))
    for part, into in zip(whole.split(with_padding), x.split(counts), strict=True):
        into.copy_(part[: len(into)])


def _grouped_gemm(
    left: list[Any],
    right: list[Any],
    out: list[Tensor],
    quantizers: list[None],
    out_dtype: torch.dtype,
    *,
    m_splits: list[int],
    **named: Any,
) -> None:
    assert len(left) == len(right) == len(out) == len(quantizers) == len(m_splits) > 0
    for a, b, y in zip(left, right, out, strict=True):
        _gemm(a, b, out_dtype, out=y, **named)


ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "geglu": lambda x: F.gelu(_halves(x)[0], approximate="tanh") * _halves(x)[1],
    "srelu": lambda x: F.relu(x).square(),
    "swiglu": lambda x: F.silu(_halves(x)[0]) * _halves(x)[1],
}


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, dim=-1)
    return first, second


def _activation(name: str, x: Tensor, quantizer: Any) -> Any:
    """The activation in fp32, quantised."""
    return quantizer.quantize(ACTIVATIONS[name](x.float()))


def _derivative(name: str, grad: Tensor, x: Tensor, quantizer: None) -> Tensor:
    assert quantizer is None
    with torch.enable_grad():
        leaf = x.detach().float().requires_grad_()
        (found,) = torch.autograd.grad(ACTIVATIONS[name](leaf), leaf, grad.float())
    return found.to(x.dtype)


def _transposed(rows: Tensor, number: int, *, out: None) -> Tensor:
    assert number in DTYPES
    assert out is None
    return rows.t().contiguous()


def _norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, given: tuple[Any, ...]
) -> tuple[Any, Tensor | None, Tensor]:
    """The norm of x [N, I] in fp32, quantised if there is a quantizer; the statistics of its rows."""
    out, quantizer, number, margin, zero_centred = given
    assert out is None
    assert (number, margin, zero_centred) == (NUMBERS[x.dtype], 0, False)
    wide, means = x.float(), None
    if bias is not None:
        means = wide.mean(1)
        wide = wide - means[:, None]
    deviations = torch.rsqrt((wide * wide).mean(1) + eps)
    y = wide * deviations[:, None] * weight.float() + (0 if bias is None else bias.float())
    return (y.to(x.dtype) if quantizer is None else quantizer.quantize(y)), means, deviations


def _differentiated(
    grad: Tensor, x: Tensor, means: Tensor | None, deviations: Tensor, weight: Tensor, *given: Any
) -> tuple[Tensor, ...]:
    """The gradients of x, of the weight and, for LayerNorm, of the bias."""
    assert given == (0, False)
    upstream, wide = grad.float(), x.float()
    n = (wide if means is None else wide - means[:, None]) * deviations[:, None]
    g = upstream * weight.float()
    inner = g - n * (g * n).mean(1, keepdim=True)
    if means is not None:
        inner = inner - g.mean(1, keepdim=True)
    found = (inner * deviations[:, None]).to(x.dtype), (upstream * n).sum(0).to(weight.dtype)
    return found if means is None else (*found, upstream.sum(0).to(weight.dtype))


LIBRARY = SimpleNamespace(
    numbers=NUMBERS,
    tex=SimpleNamespace(
        compute_amax=lambda x, largest: largest.fill_(x.float().abs().amax()),
        fp8_transpose=_transposed,
        quantize=_quantize,
        fused_multi_row_padding=_padding,
        fused_multi_row_unpadding=_unpadding,
        **{name: partial(_activation, name) for name in ACTIVATIONS},
        **{f"d{name}": partial(_derivative, name) for name in ACTIVATIONS},
        layernorm_fwd=lambda x, weight, bias, eps, *given: _norm(x, weight, bias, eps, given),
        rmsnorm_fwd=lambda x, weight, eps, *given: _norm(x, weight, None, eps, given),
        layernorm_bwd=_differentiated,
        rmsnorm_bwd=lambda grad, x, deviations, weight, *given: _differentiated(
            grad, x, None, deviations, weight, *given
        ),
    ),
    te=SimpleNamespace(
        Float8CurrentScalingQuantizer=_current,
        Float8Quantizer=_delayed,
        Float8BlockQuantizer=_BlockQuantizer,
        Float8TensorStorage=_operand,
        Float8BlockwiseQTensorStorage=_block_operand,
    ),
    extensions=SimpleNamespace(general_gemm=_gemm, general_grouped_gemm=_grouped_gemm),
)


@contextmanager
def stand_ins() -> Iterator[None]:
    """Transformer Engine's functions in plain torch, on a machine that seems able to run them."""
    modules = ("activations", "casts", "grouped", "groups", "norm", "products", "prologues", "library")
    replaced: dict[str, Any] = {f"mplug_te.{module}.library": lambda: LIBRARY for module in modules}
    replaced |= {f"mplug_te.limits.{name}": lambda _: "" for name in ("missing", "refused_by_chip")}
    with ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(patch(name, function))
        yield


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    """Transformer Engine's functions in plain torch, in every test of a file that imports this fixture."""
    with stand_ins():
        yield
