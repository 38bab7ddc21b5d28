"""QK-clip (MuonClip, Kimi K2, arXiv 2507.20534, section 2.1): smaller queries and keys where logits become too large.

H query heads, G KV heads.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mplug import Piece, StepScalars, UsageError
from mplug_nn import LargestLogits, LogitRows

if TYPE_CHECKING:
    from mplug import Assembler, Model, Run
    from mplug_muon.config import MuonConfig

FIELD = "optimizer.qk_clip"
STATISTIC = "largest_logits"
"""The attribute of an attention at which its statistic is attached."""


class Clipped(NamedTuple):
    """Rows of a parameter, the name of the statistic [H] of their attention, and the number of KV heads."""

    rows: LogitRows
    statistic: str
    groups: int


def attach_statistics(model: "Model") -> dict[str, list[Clipped]]:
    """Let every attention keep its largest logits; what to clip, by the names of parameters.

    UsageError if the model has an attention whose logits no rows of weights decide, or none at all.
    """
    found: dict[str, list[Clipped]] = {}
    added = {}
    for name, module in model.module.named_modules():
        if not hasattr(module, STATISTIC):
            continue
        rows: tuple[LogitRows, ...] = getattr(module, "logit_rows", tuple)()
        if not rows:
            normalises = getattr(module, "q_norm", None) is not None
            reason = "normalises queries and keys" if normalises else "does not state which rows decide its logits"
            raise UsageError(f"{FIELD}: '{name}' {reason}, so it cannot be clipped; remove the field")
        added[f"{name}.{STATISTIC}"] = LargestLogits(module.num_heads, module.spec)
        for one in rows:
            clipped = Clipped(one, f"{name}.{STATISTIC}.values", module.num_kv_heads)
            found.setdefault(f"{name}.{one.parameter}", []).append(clipped)
    if not added:
        raise UsageError(f"{FIELD}: the model has no attention whose logits it could bound; remove the field")
    model.attach(added)
    return found


def refuse_unclipped(run: "Run", model: "Model", clipped: Iterable[str]) -> None:
    """Raise UsageError if a parameter that must be clipped is frozen, adapted, or has another optimizer."""
    own = model.parameters()
    for name in (one for one in clipped if one in own):
        if getattr(model.module.get_submodule(name.rpartition(".")[0]), "adapter", None) is not None:
            raise UsageError(
                f"{FIELD}: '{name}' has an adapter, so it alone does not decide the logits; remove the field"
            )
        if not model.placements[name].parameter.trainable:
            raise UsageError(f"{FIELD}: '{name}' is frozen, so its attention cannot be clipped; remove the field")
        group = model.groups.get(name, -1)
        if group >= 0 and run.config.groups[group].optimizer is not None:
            raise UsageError(
                f"{FIELD}: '{name}' has an optimizer of its own (optimizer.groups.{group}), which does not clip; "
                f"remove the field, or leave this parameter to the optimizer of the run"
            )


class Clip:
    """Multiplies rows of queries and keys after an update.

    The largest logit of a head, or of the heads that share a KV head, is S in the step's forward passes, before the
    update. With gamma = min(1, threshold / S), queries become gamma^alpha times themselves and keys
    gamma^(1 - alpha); queries that meet a key of all heads become gamma times themselves.
    """

    def __init__(
        self, pieces: list[Piece], assembler: "Assembler", clipped: Mapping[str, list[Clipped]], config: "MuonConfig"
    ) -> None:
        assert config.qk_clip is not None
        self._threshold, alpha = config.qk_clip, config.qk_clip_alpha
        self._exponents = {"query": alpha, "key": 1 - alpha, "alone": 1.0}
        self._targets = [
            (part, box.start[0], one)
            for piece in pieces
            for one in clipped.get(piece.name, ())
            for box, part in assembler.parts(piece)
        ]

    @torch.no_grad()
    def __call__(self, scalars: StepScalars) -> None:
        """Clip the masters of these pieces; nothing changes in a skipped step."""
        gammas = {
            clipped: self._gammas(scalars, *clipped)
            for clipped in dict.fromkeys((one.statistic, one.groups) for _, _, one in self._targets)
        }
        for part, first, (rows, statistic, groups) in self._targets:
            of_heads = gammas[statistic, groups].to(part.device)  # [G]
            of_heads = of_heads.repeat_interleave(rows.num_heads // groups) ** self._exponents[rows.side]
            numbers = torch.arange(first, first + len(part), device=part.device) - rows.first
            heads, within = numbers // rows.stride, numbers % rows.stride
            clips = (numbers >= 0) & (heads < rows.num_heads) & (within < rows.width)
            factors = torch.where(clips, of_heads[heads.clamp(0, rows.num_heads - 1)], 1.0).to(part.dtype)
            part.mul_(factors.view(-1, *[1] * (part.ndim - 1)))

    def _gammas(self, scalars: StepScalars, statistic: str, groups: int) -> Tensor:
        """The factor of each KV head [G], in fp64."""
        largest = scalars.statistics[statistic].double().view(groups, -1).amax(dim=1)
        return (self._threshold / largest).clamp(max=1.0).masked_fill(scalars.skip.to(largest.device) > 0, 1.0)
