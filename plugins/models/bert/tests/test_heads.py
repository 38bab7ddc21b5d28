"""Heads for classes: logits and gradients are the library's, and every layout computes what one process does."""

import importlib
from typing import Any

import pytest
import torch
from layout_words import COMPILING
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("transformers")

from beside_library import library_config, ours_of
from encoder_models import CONFIGS, B, S, built, micro_batch
from library_models import drawn, relative, wide

from mplug import IGNORED
from mplug_testing.parity import require_parity

NAMES = {"0": "no", "1": "perhaps", "2": "yes"}
CLASSES: dict[str, Any] = {"id2label": NAMES, "label2id": {name: int(number) for number, name in NAMES.items()}}
STEMS = {"bert": "Bert", "roberta": "Roberta", "modernbert": "ModernBert"}
CASES = [
    *((kind, "SequenceClassification", {}) for kind in CONFIGS),
    *((kind, "TokenClassification", {}) for kind in CONFIGS),
    ("modernbert", "SequenceClassification", {"classifier_pooling": "mean", "classifier_bias": True}),
]


def labelled(head: str) -> dict[str, Tensor]:
    """A micro batch with labels at first positions, or at some positions."""
    batch = micro_batch()
    classes = torch.arange(B * S).view(B, S) % 3
    is_first = torch.arange(S).expand(B, S) == 0
    kept = is_first if head == "SequenceClassification" else batch["labels"] != IGNORED
    return {**batch, "labels": classes.masked_fill(~kept, IGNORED)}


@pytest.mark.parametrize(("kind", "head", "fields"), CASES)
def test_logits_and_gradients_are_those_of_the_library(kind: str, head: str, fields: dict[str, Any]) -> None:
    architecture = f"{STEMS[kind]}For{head}"
    dropped = {"classifier_dropout": 0.0}
    given = {**CONFIGS[kind], **CLASSES, **fields, **dropped, "architectures": [architecture]}
    model, batch = built(given), labelled(head)
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    with wide(kind):
        library = drawn(getattr(module, architecture)._from_config(library_config(given), attn_implementation="eager"))
        logits = library(input_ids=batch["tokens"]).logits
        labels = batch["labels"] if head == "TokenClassification" else batch["labels"][:, 0]
        F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum").backward()
    own = model.parameters()
    with torch.no_grad():
        for name, weight in ours_of(model, {name: x.detach() for name, x in library.named_parameters()}).items():
            own[name].copy_(weight)
    loss, count = model.loss(batch)
    loss.backward()
    assert int(count) == int((batch["labels"] != IGNORED).sum()) > 1
    found = model.logits(batch)
    found = found if head == "TokenClassification" else found[:, 0]
    assert relative(found, logits) < 1e-10
    gradients = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in library.named_parameters()}
    for name, expected in ours_of(model, gradients).items():
        gradient = own[name].grad
        assert gradient is not None, name
        assert relative(gradient, expected) < 1e-10, name


# Under layouts.

SHAPE = {"model.num_layers": 3, "model.ffn_hidden_size": 48, "model.vocab_size": 257}
SHAPE |= {"model.hidden_size": 32, "model.num_attention_heads": 4}
LABELS = {"model.labels": ["no", "perhaps", "yes"], "model.classifier_dropout": 0.1}
MOCK = {"data.name": "mock", "data.vocab_size": 3, "data.documents": 3}
"""Tokens of three kinds, whose next token is their class."""
BERT = {"model.name": "bert", **SHAPE, **LABELS, **MOCK, "model.max_position_embeddings": 20}
MODERN = {"model.name": "modernbert", **SHAPE, **LABELS, **MOCK, "model.window": 3}
WIDE = pytest.mark.wide("layouts")
LAYOUTS = ("tp2", "pp2 parallel.pp.split=[3,2]", "dp2", "zero2", "fsdp2", "cp2 parallel.cp.method=ulysses", "tp2pp2")


@pytest.mark.wide("families")
@COMPILING
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        pytest.param("tp2pp2", {**BERT, "model.head": "sequences"}, id="tp2pp2 sequences"),
        *(
            pytest.param(layout, {**settings, "model.head": head}, id=f"{layout} {name} {head}", marks=WIDE)
            for layout in LAYOUTS
            for name, settings in {"bert": BERT, "modernbert": MODERN}.items()
            for head in ("sequences", "tokens")
            if (layout, name, head) != ("tp2pp2", "bert", "sequences")
        ),
        pytest.param(
            "fsdp2", {**MODERN, "model.head": "sequences", "model.pooling": "mean"}, id="fsdp2 mean", marks=WIDE
        ),
    ],
)
def test_a_layout_computes_what_one_process_does(layout: str, settings: dict[str, Any]) -> None:
    require_parity(settings, layout)
