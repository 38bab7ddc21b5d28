"""AdamW whose moments have 8 bits per element, and a scale per row and per column. O rows, I columns, E matrices.

The scale of an element is the smaller one of the largest moments of its row and of its column (rank-1 normalization,
arXiv 2309.01507, section 4.2). Rows and columns are those of the whole matrix: ranks that share it exchange the largest
values of their parts. So codes and scales are the same under every layout, wherever ranks cut the matrix. Blocks of a
flat range, as in other 8-bit optimizers, would depend on the cuts.

A code is a root of the share of its scale, which keeps small moments apart from zero: the square root for the first
moment, the fourth root for the second one. It is rounded up or down at random, so that small changes are kept on
average, with random bits that do not depend on the layout (`rounding.py`). A second moment that is not zero never
becomes zero. Vectors have no rows to share scales, and keep moments in the format of the masters.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mplug import Optimizer, Piece, ShapedState, StepScalars, updated_on
from mplug_adamw.rounding import bits_of, counters, key_of_piece
from mplug_matrices import Block

if TYPE_CHECKING:
    from mplug import Assembler, Placement
    from mplug_adamw.config import AdamWConfig
    from mplug_matrices import BlockPart

CHUNK = 1 << 22
"""Maximum elements updated together, or one row: it bounds the memory of wide moments, to about 60 bytes each."""
STACKS = ("expert", "every_expert")
"""Named axes along which separate matrices are stacked."""
OVER = [(-1,), (-2,)]
"""A largest value for each row, and one for each column."""


def num_dims(placement: "Placement") -> int:
    """2 for matrices, earlier dimensions are stacked; fewer for vectors and stacks of vectors, which are not coded."""
    return min(2, len([dim for dim in placement.parameter.dims if dim not in STACKS]))


Cut = slice | EllipsisType
"""Some rows of a part; all of a scalar."""


class Code(NamedTuple):
    """Codes 0 to `top` (and -top to 0 if `signed`) of shares of a scale: a code is `top` times the share's root."""

    top: int
    squarings: int
    signed: bool

    @property
    def dtype(self) -> torch.dtype:
        """The format of codes."""
        return torch.int8 if self.signed else torch.uint8

    def share(self, codes: Tensor) -> Tensor:
        """The shares of non-negative codes, which are floating-point numbers."""
        share = codes / self.top
        for _ in range(self.squarings):
            share = share.square()
        return share

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        """The values of codes, in the format of their scales."""
        wide = codes.to(scale.dtype)
        return self.share(wide.abs()) * scale * wide.sign()

    def encode(self, values: Tensor, scale: Tensor, draws: Tensor) -> Tensor:
        """The codes of values, of both neighbours one with the probability that makes the mean exact.

        `draws` are in [0, 1). Small unsigned values have at least the code 1.
        """
        shares = torch.where(scale > 0, values.abs() / scale, 0.0).clamp_(max=1.0)
        root = shares
        for _ in range(self.squarings):
            root = root.sqrt()
        low = (root * self.top).floor_().clamp_(max=self.top - 1)
        below, above = self.share(low), self.share(low + 1)
        found = low + (draws < (shares - below) / (above - below))
        found = found * values.sign() if self.signed else torch.maximum(found, (values > 0).to(found.dtype))
        return found.to(self.dtype)


FIRST, SECOND = Code(127, 1, True), Code(255, 2, False)
NAMES = ("exp_avg", "exp_avg_sq")
CODES = dict(zip(NAMES, (FIRST, SECOND), strict=True))


@dataclass(frozen=True)
class Scales:
    """The largest values of a moment in each row [..., O, 1] and each column [..., 1, I] of a block."""

    rows: Tensor
    columns: Tensor

    def of(self, part: "BlockPart", cut: Cut) -> Tensor:
        """The scale of each element in some rows (or matrices of a stack) of a part."""
        rows, columns = (part.within(one) for one in (self.rows, self.columns))
        return torch.minimum(*(one[cut] if len(one) > 1 else one for one in (rows, columns)))


class QuantizedAdamW(Optimizer):
    """Advances moments twice: to find the largest ones, and, when ranks have exchanged these, to keep and use them.

    Gradients are scratch memory.
    """

    def __init__(self, pieces: list[Piece], assembler: "Assembler", config: "AdamWConfig") -> None:
        self._config, self._run = config, assembler.run
        self._sums = assembler.sums(num_dims)
        self._pieces = {piece.name: piece for piece in pieces}
        self._keys = {piece.name: key_of_piece(assembler.run, piece) for piece in pieces}
        self._steps = torch.zeros(len(pieces), device=updated_on(pieces, assembler.run.device))
        self._step_of = dict(zip(self._pieces, self._steps.unbind(), strict=True))
        self._scales: dict[Block, dict[str, Scales]] = {}
        self._states: dict[str, dict[str, Tensor | ShapedState]] = {}
        self._moments: dict[str, dict[str, Tensor]] = {}
        for piece in pieces:
            coded = num_dims(piece.placement) == 2
            self._moments[piece.name] = {
                name: torch.zeros_like(piece.master, dtype=code.dtype if coded else None)
                for name, code in CODES.items()
            }
            kept = {f"{name}_code" if coded else name: moment for name, moment in self._moments[piece.name].items()}
            shaped = self._new_scales(piece) if coded else {}
            self._states[piece.name] = {"step": self._step_of[piece.name], **kept, **shaped}

    def _new_scales(self, piece: Piece) -> dict[str, ShapedState]:
        """The scales of a piece's matrices, as states; those of a fused weight are numbered."""
        found, shape = dict[str, ShapedState](), piece.placement.shape
        stack, is_fused = len(shape) - 2, len(self._sums.blocks[piece.name]) > 1
        like = torch.empty((), dtype=self._sums.dtype, device=piece.master.device)
        for block in dict.fromkeys(part.block for part in self._sums.parts.get(piece.name, ())):
            lead, (rows, columns) = block.shape[:stack], block.shape[-2:]
            writes, suffix = self._sums.writers[block] == self._run.rank, f".{block.segment}" if is_fused else ""
            start, whole = (*block.start[:stack], 0), shape[:stack]
            self._scales[block] = {}
            for name in NAMES:
                scales = Scales(like.new_zeros(*lead, rows, 1), like.new_zeros(*lead, 1, columns))
                self._scales[block][name] = scales
                by_row, by_column = {start: scales.rows.squeeze(-1)}, {start: scales.columns.squeeze(-2)}
                found[f"{name}_row{suffix}"] = ShapedState((*whole, rows), by_row, writes)
                found[f"{name}_col{suffix}"] = ShapedState((*whole, columns), by_column, writes)
        return found

    @torch.no_grad()
    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once."""
        skipped = scalars.skip > 0
        self._steps.add_((~skipped).to(self._steps.dtype))
        for piece in self._pieces.values():
            piece.gradient.mul_(scalars.scale).masked_fill_(skipped, 0.0)
        largest = self._sums.largest(self._largest, lambda block: [*OVER, *OVER] if block.num_dims == 2 else [])
        new = {}
        for block, old in self._scales.items():
            pairs = zip(NAMES, zip(largest[block][::2], largest[block][1::2], strict=True), strict=True)
            new[block] = {name: Scales(*(one.to(old[name].rows) for one in pair)) for name, pair in pairs}
        for part in self._sums:
            for cut in _cuts(part):
                self._update(part, cut, new.get(part.block), scalars, skipped)
        for block, scales in new.items():
            for name, held in self._scales[block].items():
                for old_one, new_one in ((held.rows, scales[name].rows), (held.columns, scales[name].columns)):
                    old_one.copy_(torch.where(skipped, old_one, new_one))

    def _largest(self, part: "BlockPart") -> list[Tensor]:
        """The largest new moments of the rows and the columns of a part, of both moments."""
        if part.block.num_dims != 2:
            return []
        found: list[list[Tensor]] = [[], [], [], []]
        for cut in _cuts(part):
            moments = self._advanced(part, cut)
            for number, dims in enumerate(2 * OVER):
                found[number].append(moments[number // 2].abs().amax(dims, keepdim=True))
        stacked = len(part.block.shape) > 2
        return [
            torch.cat(ones) if stacked or number % 2 == 0 else torch.stack(ones).amax(0)
            for number, ones in enumerate(found)
        ]

    def _advanced(self, part: "BlockPart", cut: Cut) -> tuple[Tensor, Tensor]:
        """Both new moments of some rows of a part, which are the held ones in a skipped step but for rounding."""
        name, config = part.block.name, self._config
        held = [part.of(self._moments[name][moment])[cut] for moment in NAMES]
        if part.block.num_dims == 2:
            scales = self._scales[part.block]
            held = [
                CODES[moment].decode(one, scales[moment].of(part, cut)) for moment, one in zip(NAMES, held, strict=True)
            ]
        gradient = part.of(self._pieces[name].gradient)[cut].to(held[0].dtype)
        first = torch.lerp(held[0], gradient, 1 - config.beta1)
        return first, torch.lerp(held[1], gradient.square(), 1 - config.beta2)

    def _update(
        self, part: "BlockPart", cut: Cut, scales: dict[str, Scales] | None, scalars: StepScalars, skipped: Tensor
    ) -> None:
        name, config = part.block.name, self._config
        piece, moments = self._pieces[name], self._advanced(part, cut)
        first, second = moments
        count = self._step_of[name].clamp(min=1.0).double()
        mean, square = ((1 - beta**count).to(first.dtype) for beta in (config.beta1, config.beta2))
        update = first / mean / ((second / square).sqrt_() + config.eps)
        decay = scalars.lr.double() * scalars.weight_decay.double() * float(piece.parameter.decays)
        master = part.of(piece.master)[cut]
        value = master * (1 - decay).to(first.dtype) - update * scalars.lr
        master.copy_(torch.where(skipped, master, value))
        bits = None
        for number, moment in enumerate(NAMES):
            kept, new = part.of(self._moments[name][moment])[cut], moments[number]
            if scales is not None:
                if bits is None:
                    box = part.held.box
                    places = counters(piece.placement.shape, box.start, box.shape, master.device)[cut]
                    bits = bits_of(self._keys[name], self._step_of[name], places)
                draws = ((bits >> 16 * number) & 0xFFFF).to(new.dtype) / 0x10000
                new = CODES[moment].encode(new, scales[moment].of(part, cut), draws)
            kept.copy_(torch.where(skipped, kept, new.to(kept.dtype)))

    def state(self, piece: Piece) -> dict[str, Tensor | ShapedState]:
        """The live state of a piece: codes and scales of matrices, moments of vectors, and the number of updates.

        Codes have names of their own, so that no run with other moments reads them as values.
        """
        return dict(self._states[piece.name])


def _cuts(part: "BlockPart") -> Iterator[Cut]:
    """The rows of a part, or the matrices of a stack, at most `CHUNK` elements at a time; scalars are whole."""
    shape = part.held.shape
    if not shape:
        yield ...
        return
    rows = max(1, CHUNK * shape[0] // max(1, part.held.numel))
    for start in range(0, shape[0], rows):
        yield slice(start, min(start + rows, shape[0]))
