"""Weight gradients that are computed later: a pass hands out their operands, and `wgrad` multiplies them afterwards.

The operands leave a compiled backward pass as its results. An operator that kept references to them would be wrong: a
compiler reuses the memory of the arguments of an operator.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

FLOATS = {2: torch.float16, 4: torch.float32, 8: torch.float64}
Operands = tuple[Tensor, ...]


class Later(NamedTuple):
    """What a product receives if it must not compute the gradient of its weight now.

    `taps` are tensors that have the shapes and dtypes of `bits_of` the operands. The operands become their gradients.
    To find these shapes, a pass of tensors without memory has no taps: `declare` receives what each product declares
    (`WeightProduct.operands`). Such a pass has no backward.

    A module that multiplies several times in a pass, by parts of its input, passes `part_of` to its products.
    """

    taps: Operands = ()
    declare: Callable[..., None] | None = None


def part_of(later: Later | None, number: int, parts: int) -> Later | None:
    """What the product of part `number` of `parts` receives: its share of the taps."""
    if later is None or parts == 1:
        return later
    length = len(later.taps) // parts
    declare = None if later.declare is None else partial(later.declare, parts=parts)
    return Later(later.taps[number * length : (number + 1) * length], declare)


def hand_out(operands: Operands, num_taps: int) -> Operands:
    """The gradients of the taps, in a backward pass."""
    return tuple(bits_of(one) for one in operands) if num_taps else ()


def bits_of(operand: Tensor) -> Tensor:
    """An operand as a floating-point tensor with the same bits, because gradients are floating-point numbers.

    Formats of one byte become pairs: [..., n] -> [..., n / 2]. Raises ValueError if n is odd.
    """
    if operand.dtype in (torch.bfloat16, *FLOATS.values()):
        return operand
    if operand.itemsize > 1:
        return operand.view(FLOATS[operand.itemsize])
    if operand.dim() == 0 or operand.shape[-1] % 2:
        raise ValueError(
            f"an operand of the weight's gradient is {operand.dtype} with shape {tuple(operand.shape)}; to compute the "
            f"gradient later, the last dimension must be even"
        )
    return operand.view(FLOATS[2])


def without_memory(operand: Tensor) -> Tensor:
    """A tensor on the meta device with the shape, strides and dtype of an operand."""
    return torch.empty_strided(operand.shape, operand.stride(), dtype=operand.dtype, device="meta")


class _Tap(torch.autograd.Function):
    """A tensor without memory of its own whose gradient goes to `operands`; `seed` [] starts the path to it."""

    @staticmethod
    def forward(ctx, seed, like, operands, number):  # type: ignore[no-untyped-def]
        ctx.operands, ctx.number, ctx.dtype = operands, number, like.dtype
        bits = bits_of(like)
        return torch.zeros((), dtype=bits.dtype, device=seed.device).expand(bits.shape)

    @staticmethod
    def backward(ctx, bits):  # type: ignore[no-untyped-def]
        ctx.operands[ctx.number] = bits.view(ctx.dtype)
        return None, None, None, None


class Taps:
    """The taps of one product in one pass; after backward, `operands` are those of the weight's gradient.

    `like` are tensors of the operands' shapes and dtypes (on the meta device, for example).
    """

    def __init__(self, like: Iterable[Tensor], device: torch.device) -> None:
        like = list(like)
        self._operands: list[Any] = [None] * len(like)
        seed = torch.zeros((), device=device, requires_grad=True)
        taps = (_Tap.apply(seed, one, self._operands, number) for number, one in enumerate(like))  # type: ignore[no-untyped-call]
        self.later = Later(tuple(taps))

    def take(self) -> Operands | None:
        """The operands, which are then forgotten here; None if backward has not reached the product."""
        operands = tuple(self._operands)
        self._operands.clear()
        return None if any(one is None for one in operands) else operands
