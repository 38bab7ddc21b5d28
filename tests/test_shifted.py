"""Entries that the host makes from others: tokens and labels further ahead (`Plan.shifted`)."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mplug import Shift
from mplug.training.batch_parts import with_shifted

TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]])
LABELS = torch.tensor([[2, 3, -100, 5, 6, 7], [12, 13, 14, -100, 16, 17]])
PLAN: Any = SimpleNamespace(
    context={"tokens": ("batch", "sequence"), "labels": ("batch", "sequence")},
    shifted={"tokens_1": Shift("tokens", 1, 0), "labels_2": Shift("labels", 2, -100)},
)


def test_entries_are_shifted_to_the_end_of_the_sequence() -> None:
    found = with_shifted({"tokens": TOKENS, "labels": LABELS}, PLAN)
    assert found["tokens_1"].tolist() == [[2, 3, 4, 5, 6, 0], [12, 13, 14, 15, 16, 0]]
    assert found["labels_2"].tolist() == [[-100, 5, 6, 7, -100, -100], [14, -100, 16, 17, -100, -100]]
    assert torch.equal(found["tokens"], TOKENS)


def test_no_entry_comes_from_another_document() -> None:
    lengths = torch.tensor([[4, 2], [6, 0]])
    found = with_shifted({"tokens": TOKENS, "labels": LABELS, "document_lengths": lengths}, PLAN)
    assert found["tokens_1"].tolist() == [[2, 3, 4, 0, 6, 0], [12, 13, 14, 15, 16, 0]]
    assert found["labels_2"].tolist() == [[-100, 5, -100, -100, -100, -100], [14, -100, 16, 17, -100, -100]]


@pytest.mark.parametrize("length", [1, 2])
def test_a_sequence_that_is_not_longer_than_the_shift_has_nothing_ahead(length: int) -> None:
    found = with_shifted({"tokens": TOKENS[:, :length], "labels": LABELS[:, :length]}, PLAN)
    assert found["labels_2"].tolist() == [[-100] * length] * 2


def test_a_plan_without_shifted_entries_leaves_the_micro_batch_alone() -> None:
    batch = {"tokens": TOKENS}
    assert with_shifted(batch, SimpleNamespace(shifted={})) is batch  # type: ignore[arg-type]
