"""AdamW whose moments are in bf16, rounded stochastically.

A moment moves by a small part of itself in each step. Rounded to nearest in bf16 (8 bits), a small change is lost every
time. Rounded up or down at random, with probabilities that make the mean exact, it is kept on average. The random bits
are the same under any layout (`rounding.py`).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mplug import Box, Optimizer, Piece, StepScalars, region, updated_on
from mplug_adamw.rounding import bits_of, counters, key_of_piece

if TYPE_CHECKING:
    from mplug import Run
    from mplug_adamw.config import AdamWConfig

CHUNK = 1 << 22
"""Maximum elements updated together: it bounds the memory of wide moments and random bits, to about 50 bytes each."""
FIELD = 1 << 16
"""The values of the 16 bits of fp32 that bf16 does not have."""


class Part(NamedTuple):
    """Views of a piece's tensors on the elements of a part, and where it lies in the logical tensor."""

    piece: Piece
    master: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    box: Box


class RoundedAdamW(Optimizer):
    """Updates pieces part by part: moments are widened, advanced, used, and rounded again."""

    def __init__(self, run: "Run", pieces: list[Piece], config: "AdamWConfig") -> None:
        self._config, self._pieces, self._rank = config, pieces, run.rank
        self._keys = {piece.name: key_of_piece(run, piece) for piece in pieces}
        self._steps = torch.zeros(len(pieces), device=updated_on(pieces, run.device))
        self._states = {
            piece.name: {
                "step": step,
                "exp_avg": torch.zeros_like(piece.master, dtype=torch.bfloat16),
                "exp_avg_sq": torch.zeros_like(piece.master, dtype=torch.bfloat16),
            }
            for piece, step in zip(pieces, self._steps.unbind(), strict=True)
        }

    @torch.no_grad()
    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once."""
        skipped = scalars.skip > 0
        self._steps.add_((~skipped).to(self._steps.dtype))
        for piece in self._pieces:
            for part in self._parts(piece):
                self._update(part, scalars, skipped)

    def _parts(self, piece: Piece) -> Iterator[Part]:
        """The parts of a piece, each with at most `CHUNK` elements or one row; padding is in none."""
        state = self._states[piece.name]
        tensors = (piece.master, piece.gradient, state["exp_avg"], state["exp_avg_sq"])
        for box in piece.placement.boxes(self._rank):
            views = [region(tensor, box) for tensor in tensors]
            each = len(views[0]) if views[0].dim() else 1
            rows = max(1, CHUNK * each // max(1, box.numel))
            for start in range(0, each, rows):
                cut = [view[start : start + rows] if view.dim() else view for view in views]
                begin = (box.start[0] + start, *box.start[1:]) if box.start else ()
                place = Box(begin, tuple(cut[0].shape), begin)
                yield Part(piece, cut[0], cut[1], cut[2], cut[3], place)

    def _update(self, part: Part, scalars: StepScalars, skipped: Tensor) -> None:
        config, step = self._config, self._states[part.piece.name]["step"]
        wide = torch.promote_types(part.master.dtype, torch.float32)
        gradient = part.gradient.to(wide) * scalars.scale
        first = torch.lerp(part.first.to(wide), gradient, 1 - config.beta1)
        second = torch.lerp(part.second.to(wide), gradient.square(), 1 - config.beta2)
        count = step.clamp(min=1.0).double()
        mean, square = ((1 - beta**count).to(wide) for beta in (config.beta1, config.beta2))
        update = first / mean / ((second / square).sqrt_() + config.eps)
        decay = scalars.lr.double() * scalars.weight_decay.double() * float(part.piece.parameter.decays)
        value = part.master * (1 - decay).to(wide) - update * scalars.lr
        places = counters(part.piece.placement.shape, part.box.start, part.box.shape, part.master.device)
        bits = bits_of(self._keys[part.piece.name], step, places)
        for held, moment, own in ((part.first, first, bits), (part.second, second, bits >> 16)):
            held.copy_(torch.where(skipped, held, rounded(moment.float(), own)))
        part.master.copy_(torch.where(skipped, part.master, value))

    def state(self, piece: Piece) -> dict[str, Tensor]:
        """The live state of a piece, under torch's names; both moments are in bf16."""
        return dict(self._states[piece.name])


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """x [...], fp32, in bf16: away from zero with the probability that makes the mean x, by the lowest 16 of `bits`."""
    return ((x.view(torch.int32) + (bits & (FIELD - 1)).int()) & -FIELD).view(torch.float32).to(torch.bfloat16)
