"""The contrastive loss compares all pairs of a global batch, whatever ranks have them, with exact gradients."""

import re
from typing import Any

import pytest
import torch
from conformance import alone, ranks_of, require_equal
from mplug_bert.heads import EmbeddingHead
from torch.nn import functional as F

from mplug import IGNORED
from mplug.model.build import build_model
from mplug.training.assembly import build
from mplug_invariance import layout_dependence
from mplug_testing import run_workers
from mplug_testing.faults import Fault
from mplug_testing.harness import tiny_run
from mplug_testing.parity import require_parity
from mplug_validation import evaluate

B, S, D = 3, 12, 8
LENGTHS = torch.tensor([[3, 4, 5, 0, 0], [2, 2, 4, 3, 1], [5, 7, 0, 0, 0]])


@pytest.mark.parametrize("mean", [False, True])
def test_the_loss_and_its_gradients_are_those_of_a_plain_reference(mean: bool) -> None:
    x = torch.randn(B, S, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    labels = torch.full((B, S), IGNORED)
    begins = LENGTHS.cumsum(1) - LENGTHS
    pairs = [(0, 0), (1, 0), (1, 2), (2, 0)]  # (sample, first document)
    for sample, document in pairs:
        labels[sample, begins[sample, document]] = 0
    loss, count = EmbeddingHead(mean=mean, temperature=0.1)(x, labels, LENGTHS)
    (found,) = torch.autograd.grad(loss, x)

    def vector(sample: int, document: int) -> torch.Tensor:
        begin = int(begins[sample, document])
        own = x[sample, begin : begin + int(LENGTHS[sample, document])]
        return F.normalize(own.mean(0) if mean else own[0], dim=0)

    queries = torch.stack([vector(*pair) for pair in pairs])
    keys = torch.stack([vector(sample, document + 1) for sample, document in pairs])
    expected = F.cross_entropy(queries @ keys.T / 0.1, torch.arange(len(pairs)), reduction="sum")
    (gradient,) = torch.autograd.grad(expected, x)
    assert int(count) == len(pairs)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-14)


# Under layouts.

EMBEDDING: dict[str, Any] = {
    "model.name": "modernbert",
    "model.head": "embedding",
    "model.num_layers": 3,
    "model.ffn_hidden_size": 48,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.vocab_size": 257,
    "model.window": 3,
    "data.name": "mock",
    "data.documents": 5,
    "trainer.global_batch_size": 8,
    "trainer.eval_samples": 8,
}
MEAN = {**EMBEDDING, "model.pooling": "mean"}
WIDE = pytest.mark.wide("layouts")


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        pytest.param("dp2", MEAN, id="dp2 mean"),
        *(
            pytest.param(layout, settings, id=f"{layout} {name}", marks=WIDE)
            for layout in ("dp2", "zero2", "fsdp2", "dp2pp2", "zero2tp2")
            for name, settings in {"first": EMBEDDING, "mean": MEAN}.items()
            if (layout, name) != ("dp2", "mean")
        ),
    ],
)
def test_data_parallel_ranks_compare_the_pairs_of_all_of_them(layout: str, settings: dict[str, Any]) -> None:
    reference = alone({**settings, "trainer.micro_batch_size": 8})
    whole = {"parallel.tp.sequence_parallel": False} if "tp" in layout else {}
    require_equal(ranks_of(layout, settings, {"trainer.micro_batch_size": 4, **whole}), reference)


def test_an_evaluation_of_several_micro_batches_depends_on_the_layout_and_says_so() -> None:
    longer = {**EMBEDDING, "trainer.micro_batch_size": 4, "trainer.eval_samples": 16}
    ranks = run_workers(2, evaluated, {**longer, "parallel.layout": "dp2"})
    one = evaluated({**longer, "trainer.micro_batch_size": 8})
    assert ranks[0] == ranks[1]
    assert ranks[0] != pytest.approx(one, rel=1e-6)
    run = tiny_run({**EMBEDDING, "trainer.micro_batch_size": 8})
    assert [line for line in layout_dependence(run, build_model(run)) if line.startswith("head: an evaluation")]


def evaluated(settings: dict[str, Any]) -> float:
    """The loss of an evaluation before the first step."""
    run = tiny_run({"trainer.precision": "fp64", **settings})
    return evaluate(run, build(run))


@pytest.mark.parametrize(
    ("layout", "changes", "sentence"),
    [
        ("dp2", {"trainer.micro_batch_size": 2}, "model.head=embedding compares all pairs of a step with each other"),
        ("cp2", {"trainer.micro_batch_size": 8}, "parallel/cp divides the sequence"),
        ("tp2", {"trainer.micro_batch_size": 8}, "set parallel.tp.sequence_parallel=false"),
    ],
)
def test_what_would_compare_other_pairs_is_refused(layout: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Fault, match=re.escape(sentence)):
        require_parity({**EMBEDDING, "trainer.micro_batch_size": 4, **changes}, layout)
