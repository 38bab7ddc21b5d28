"""Checks of what a model reads of a sample's order: positions, by shifting them, and documents, by cutting a sample."""

from typing import Literal
from unittest import SkipTest

import torch
from torch import Tensor

from mplug.contracts.micro_batch import MicroBatch
from mplug.errors import UsageError
from mplug.model.model import Model
from mplug.training.batch_parts import with_shifted
from mplug_nn.loss import IGNORED
from mplug_testing.harness import TinySettings
from mplug_testing.model_checks import Trial
from mplug_testing.suite import Fault, require

Positions = Literal["relative", "absolute", "ignored"]
NUM_DOCUMENTS = 3
PACKED = {"data.documents": NUM_DOCUMENTS}
"""The settings with which the tiny run's data packs documents."""
ROUNDING = 1e-9
"""Maximum relative difference of equal results in fp64."""
LENGTHS, POSITIONS = "document_lengths", "positions"


def takes(model: Model, entry: str) -> bool:
    """Whether a unit of the plan takes an entry."""
    units = (*model.plan.units, *model.plan.inference)
    return any(entry in (*unit.inputs, *unit.optional) for unit in units)


def require_positions(trial: Trial, declared: Positions | None) -> None:
    """Raise Fault if the model ignores positions that its units take, or reads them in another way than declared."""
    if not takes(trial.model, POSITIONS):
        require(
            declared in (None, "ignored"),
            f"the suite declares positions = '{declared}', and no unit of the plan takes 'positions'",
        )
        raise SkipTest("no unit of the plan takes 'positions'")
    trial.shake()
    trial.model.module.eval()
    length = trial.batches[0]["tokens"].shape[1]
    batch = trial.shortened(trial.batches[0], length - 1)
    own = torch.arange(length - 1)[None]
    before = _losses(trial, {**batch, POSITIONS: own})
    reads = _differ(before, _losses(trial, {**batch, POSITIONS: own.flip(1)}))
    if declared == "ignored":
        require(not reads, "the suite declares positions = 'ignored', and other positions change the losses")
        return
    require(
        reads,
        "units of the plan take 'positions', and the losses do not depend on them: positions in the reverse order give "
        "the same; pass them on, or remove them from the units' inputs (if the model reads the order of tokens in "
        "another way, set the suite's positions = 'ignored')",
    )
    moved = _differ(before, _losses(trial, {**batch, POSITIONS: own + 1}))
    if declared is None:
        kind = "absolute" if moved else "relative"
        raise SkipTest(
            f"the suite does not declare what positions mean; they seem to be {kind}: set positions = '{kind}', and "
            f"the suite tests it"
        )
    if declared == "relative":
        require(
            not moved,
            "the suite declares positions = 'relative', and positions that begin at 1 instead of 0 change the losses",
        )
    else:
        require(
            moved,
            "the suite declares positions = 'absolute', and positions that begin at 1 instead of 0 give equal losses",
        )


def require_documents_apart(settings: TinySettings) -> None:
    """Raise Fault unless a packed sample has the losses of its documents alone; SkipTest if the model takes none."""
    try:
        trial = Trial.of({**settings, **PACKED})
    except UsageError as error:
        raise SkipTest(f"a run with packed samples is refused: {error}") from None
    if not takes(trial.model, LENGTHS):
        raise SkipTest(f"no unit of the plan takes '{LENGTHS}', so mplug refuses loaders that pack documents")
    trial.shake()
    trial.model.module.eval()
    batch = trial.batches[0]
    require(LENGTHS in batch, f"the data of the tiny run has no '{LENGTHS}'")
    for row in range(len(batch[LENGTHS])):
        sample = trial.part(batch, slice(row, row + 1))
        _require_documents_of(trial, sample)


def _require_documents_of(trial: Trial, sample: MicroBatch) -> None:
    packed, start = _losses(trial, sample)[0], 0
    for number, length in enumerate(sample[LENGTHS][0].tolist()):
        alone = _losses(trial, _document(trial, sample, start, length))[0]
        found = packed[start : start + length]
        if _differ(found, alone):
            raise Fault(
                f"document {number} of a packed sample has the losses {_shown(found)} in the sample, and alone "
                f"{_shown(alone)}; no token may read another document: pass '{LENGTHS}' to the attention, and let a "
                f"recurrence begin anew at every document"
            )
        start += length


def _document(trial: Trial, sample: MicroBatch, start: int, length: int) -> MicroBatch:
    """A document alone in a sample of its length. Its positions are those that it has in the sample."""
    context = trial.model.plan.context
    _, sequence = context["tokens"]
    cut = {name: axes.index(sequence) for name, axes in context.items() if sequence in axes and name in sample}
    own = {name: x.narrow(cut[name], start, length) if name in cut else x for name, x in sample.items()}
    return with_shifted({**own, LENGTHS: torch.tensor([[length]])}, trial.model.plan)


def _losses(trial: Trial, batch: MicroBatch) -> Tensor:
    """The loss of every position [B, S], 0 where there is no target: one forward pass for each position of a target."""
    found = torch.zeros(batch["labels"].shape, dtype=torch.float64)
    if trial.model.plan.inference:
        logits = trial.logits(batch).double()
        labels = batch["labels"]
        picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return torch.where(labels == IGNORED, found, -picked)
    with torch.no_grad():
        for row, position in (batch["labels"] != IGNORED).nonzero().tolist():
            labels = torch.full_like(batch["labels"], IGNORED)
            labels[row, position] = batch["labels"][row, position]
            found[row, position] = float(trial.loss({**batch, "labels": labels})[0])
    return found


def _differ(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) > ROUNDING * max(1.0, float(one.abs().max()))


def _shown(losses: Tensor) -> str:
    return ", ".join(f"{loss:.4f}" for loss in losses[:4].tolist()) + (", ..." if len(losses) > 4 else "")
