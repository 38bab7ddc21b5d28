"""AdamW in one pass over memory: a Triton kernel that updates all pieces, of any sizes, in one launch.

Per element it reads gradient, master and moments, and writes master, moments and the bf16 weight: 30 bytes, or 28 if
the gradient is in bf16.
"""

from functools import cached_property
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from mplug import Optimizer, Piece, StepScalars
from mplug_adamw.state import States

if TYPE_CHECKING:
    from mplug_adamw.config import AdamWConfig

CHUNK = 1 << 14
"""Elements per program: few enough that the last programs of a launch end at about the same time."""
BLOCK = 1 << 10
"""Elements that a program holds in registers: two vectors of four per thread."""
NUM_WARPS = 4
FIELDS: tl.constexpr = tl.constexpr(8)
"""Columns of the table of pieces: addresses of master, gradient, exp_avg, exp_avg_sq and weight (0: none); number of
elements; 1 if the piece decays; 1 if its addresses allow vectors of four elements."""


class OnePassAdamW(Optimizer):
    """Updates all pieces in one launch per step, and also writes the weights.

    The tensors of a piece must be contiguous: the first step records their addresses, and the first after a move.
    """

    one_pass = True
    low_precision_gradients = True

    def __init__(self, pieces: list[Piece], config: "AdamWConfig") -> None:
        self._pieces, self._states, self._config = pieces, States(pieces), config
        betas = torch.tensor([config.beta1, config.beta2], device=self._states.steps.device)
        self._betas = betas.double()  # from fp32, as in the kernel: 1 - beta must be the same number

    def step(self, scalars: StepScalars) -> None:
        """Update every piece once."""
        self._states.steps.add_(1 - scalars.skip)
        pieces, chunks = self._tables
        in_bf16 = any(piece.gradient.dtype is torch.bfloat16 for piece in self._pieces)
        adamw_one_pass[(len(chunks),)](
            pieces,
            chunks,
            unbiased(self._states.steps, self._betas),
            scalars.lr,
            scalars.scale,
            scalars.skip,
            scalars.weight_decay,
            self._config.beta1,
            self._config.beta2,
            self._config.eps,
            gradient_type=tl.bfloat16 if in_bf16 else tl.float32,
            chunk_size=CHUNK,
            block_size=BLOCK,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,  # multiply-adds round once, as in torch's kernel
        )

    def states_moved(self) -> None:
        """Record addresses anew."""
        self.__dict__.pop("_tables", None)

    def state(self, piece: Piece) -> dict[str, Tensor]:
        """The live moments and step count of a piece."""
        return self._states.of(piece)

    @cached_property
    def _tables(self) -> tuple[Tensor, Tensor]:
        """The pieces [P, FIELDS] and their chunks [C, 2], made at the first step; addresses are unknown before."""
        rows = torch.tensor([self._row(piece) for piece in self._pieces])
        chunks = chunks_of([piece.master.numel() for piece in self._pieces])
        device = self._states.steps.device
        return _sent(rows, device), _sent(chunks, device)

    def _row(self, piece: Piece) -> list[int]:
        state = self._states.of(piece)
        tensors = (piece.master, piece.gradient, state["exp_avg"], state["exp_avg_sq"])
        addresses = [tensor.data_ptr() for tensor in tensors]
        weight = 0 if piece.weight is None else piece.weight.data_ptr()
        aligned = weight % 8 == 0 and all(
            address % (4 * tensor.itemsize) == 0 for address, tensor in zip(addresses, tensors, strict=True)
        )
        return [*addresses, weight, piece.master.numel(), int(piece.parameter.decays), int(aligned)]


def unbiased(steps: Tensor, betas: Tensor) -> Tensor:
    """[P, 2]: 1 - beta1^t and sqrt(1 - beta2^t), with t the number of `steps` [P] of a piece."""
    found = 1 - betas ** steps.double().unsqueeze(1)
    found[:, 1].sqrt_()
    return found.float()


def chunks_of(numels: list[int]) -> Tensor:
    """[C, 2]: (piece of the chunk, number of the chunk in the piece), for pieces with these numbers of elements."""
    counts = torch.tensor([-(-numel // CHUNK) for numel in numels])
    piece = torch.arange(len(numels)).repeat_interleave(counts)
    number = torch.arange(len(piece)) - (counts.cumsum(0) - counts)[piece]
    return torch.stack([piece, number], dim=1)


def _sent(table: Tensor, device: torch.device) -> Tensor:
    """The table on the device, copied asynchronously."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


@triton.jit
def _pointer(address, dtype: tl.constexpr, aligned: tl.constexpr):
    pointer = address.to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 4 * dtype.primitive_bitwidth // 8) if aligned else pointer


@triton.jit
def _update(places, numbers, offsets, inside, gradient_type: tl.constexpr, aligned: tl.constexpr):
    """Update the elements at `offsets` that are `inside`; None means all of them."""
    master, gradient, exp_avg, exp_avg_sq, weight, has_weight = places
    rate, scale, decay, root, beta1, beta2, eps = numbers
    p = _pointer(master, tl.float32, aligned) + offsets
    g = _pointer(gradient, gradient_type, aligned) + offsets
    m = _pointer(exp_avg, tl.float32, aligned) + offsets
    v = _pointer(exp_avg_sq, tl.float32, aligned) + offsets
    first, second, value = tl.load(m, inside), tl.load(v, inside), tl.load(p, inside)
    scaled = tl.load(g, inside).to(tl.float32) * scale
    first = beta1 * first + (1 - beta1) * scaled
    second = beta2 * second + (1 - beta2) * (scaled * scaled)
    value -= decay * value
    value -= tl.div_rn(rate * first, tl.div_rn(tl.sqrt_rn(second), root) + eps)
    tl.store(p, value, inside)
    tl.store(m, first, inside)
    tl.store(v, second, inside)
    if has_weight:
        tl.store(_pointer(weight, tl.bfloat16, aligned) + offsets, value.to(tl.bfloat16), inside)


@triton.jit(do_not_specialize=["lr", "scale", "skip", "weight_decay"])
def adamw_one_pass(
    pieces,
    chunks,
    corrections,
    lr,
    scale,
    skip,
    weight_decay,
    beta1,
    beta2,
    eps,
    gradient_type: tl.constexpr,
    chunk_size: tl.constexpr,
    block_size: tl.constexpr,
):
    """Update a chunk: the full blocks of an aligned piece by vectors of four elements, the rest element by element.

    `pieces` [P, FIELDS], `chunks` [C, 2] and `corrections` [P, 2] are the tables above, `lr`, `scale`, `skip` and
    `weight_decay` [].
    """
    if tl.load(skip) == 0:
        piece = tl.load(chunks + 2 * tl.program_id(0))
        start = tl.load(chunks + 2 * tl.program_id(0) + 1) * chunk_size
        row = pieces + piece * FIELDS
        count = tl.minimum(tl.load(row + 5) - start, chunk_size).to(tl.int32)
        gradient_bytes: tl.constexpr = gradient_type.primitive_bitwidth // 8
        master, gradient = tl.load(row) + 4 * start, tl.load(row + 1) + gradient_bytes * start
        exp_avg, exp_avg_sq = tl.load(row + 2) + 4 * start, tl.load(row + 3) + 4 * start
        weight = tl.load(row + 4)
        places = (master, gradient, exp_avg, exp_avg_sq, weight + 2 * start, weight != 0)
        rate = tl.div_rn(tl.load(lr), tl.load(corrections + 2 * piece))
        root = tl.load(corrections + 2 * piece + 1)
        decay = tl.load(lr) * tl.load(weight_decay) * tl.load(row + 6)
        numbers = (rate, tl.load(scale), decay, root, beta1, beta2, eps)
        whole = count // block_size * block_size * tl.load(row + 7).to(tl.int32)
        for at in range(0, whole, block_size):
            _update(places, numbers, at + tl.arange(0, block_size), None, gradient_type, True)
        for at in range(whole, count, block_size):
            offsets = at + tl.arange(0, block_size)
            _update(places, numbers, offsets, offsets < count, gradient_type, False)
