"""Micro batches: mappings from entry names to tensors. The plan's `context` names the entries.

Shapes: `B` samples of a micro batch, `S` sequence length, `M` documents of a sample.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MicroBatch = Mapping[str, "Tensor"]
IGNORED = -100
"""The label of a position that has no target."""
DOCUMENTS = "document_lengths"
"""The entry of a packed micro batch with the lengths of each sample's documents [B, M]."""

LOSS_WEIGHTS = "loss_weights"
"""The entry of a micro batch with the factors of the losses of its labels [B, S]."""

SEQUENCES = "sequences"
"""The entry of a micro batch with the number, in its sample, of the sequence of each position [B, S]; -1: of none.

An objective compares sequences with one another: 2i and 2i + 1 are the chosen and the rejected answer of a pair.
"""
REFERENCE = "reference_log_probabilities"
"""The entry of a micro batch with log-probabilities of its labels [B, S] under other weights than those of the run.

An objective uses their sums over sequences: a loader that knows these alone has each at one position of its sequence.
"""
MARGINS = "margins"
"""The entry of a micro batch with the margins of pairs [B, S], each at one position of an answer; 0 elsewhere.

The margin says by how much the score of the chosen answer exceeds that of the rejected one, as people rated it.
"""
ADVANTAGES = "advantages"
"""The entry of a micro batch with how much better each token is than expected [B, S]: of rollouts, by their rewards."""
SAMPLED = "sampled_log_probabilities"
"""The entry of a micro batch with the log-probability that each label had when it was sampled [B, S]."""
TOP_TOKENS = "top_tokens"
"""The entry of a micro batch with the k most probable tokens of each label's position by a teacher [B, S, k]."""
TOP_TAUGHT = "top_log_probabilities"
"""The entry with the teacher's log-probabilities of these tokens, and of all others together [B, S, k + 1]."""
OF_OBJECTIVES = frozenset({SEQUENCES, REFERENCE, MARGINS, ADVANTAGES, SAMPLED, TOP_TOKENS, TOP_TAUGHT})
"""The entries that objectives alone take."""


@dataclass(frozen=True, eq=False)
class RankBatch(Mapping[str, "Tensor"]):
    """A rank's part of a micro batch on the device, as the host's feed hands it to a stepper.

    `number` is that of the micro batch in the step, from 0 on. `is_last` says that the step ends with it. `positions`
    and `targets` are the numbers of labels, and of labels that are not ignored, in the whole micro batch; an objective
    may count something else than these (`Plan.count`). A micro batch without labels has no `targets`; labels that a
    loader keeps on a device are counted there. `rows` are the number of rows of each stream, and the sum of the
    squared lengths of their segments, by the entry with these lengths.
    """

    entries: MicroBatch
    number: int
    is_last: bool
    positions: int
    targets: "int | Tensor | None"
    rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> "Tensor":
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)
