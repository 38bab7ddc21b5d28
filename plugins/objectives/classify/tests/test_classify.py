"""A decoder with a head for classes: beside plain torch, with labelled texts, and under layouts."""

import json
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mplug_huggingface_format.export import FolderExport

from mplug import UsageError
from mplug.training.assembly import build
from mplug_pretrained import ExportOptions, format_named
from mplug_testing.harness import in_fp64, tiny_run
from mplug_testing.objectives import ObjectiveSuite

WORDS = ("ada", "byron", "curie", "dirac", "euler", "fermi", "gauss")
LINES = [{"text": " ".join(WORDS[: n % 5 + 1]), "label": ("short", "long", "other")[min(n % 5, 2)]} for n in range(24)]
FILE = Path(mkdtemp()) / "texts.jsonl"
FILE.write_text("".join(f"{json.dumps(line)}\n" for line in LINES))
TEXTS: dict[str, Any] = {
    "data.name": "labelled",
    "data.path": str(FILE),
    "data.validation_path": str(FILE),
    "data.label_at": "last",
    "data.max_documents": 4,
    "model.vocab_size": 260,
    "kernels.default": None,
    "trainer.seq_length": 48,
    "trainer.global_batch_size": 4,
    "optimizer.lr": 0.02,
    "objectives.classify.labels": ["short", "long", "other"],
    "objectives.classify.init_std": 0.5,
}


class TestClassify(ObjectiveSuite):
    """Micro batches of packed texts."""

    plugin = "classify"
    settings = TEXTS
    layouts = ("tp2", "cp2", "pp2", "zero2", "fsdp2")
    examples = {"labels": [["short", "long", "other", "fourth"]]}


def test_losses_and_gradients_are_those_of_a_classifier_of_each_text_alone() -> None:
    parts = build(tiny_run(in_fp64(TEXTS)))
    batches = [*parts.train_loader.loader.take(4)]
    parts.stepper.forward_backward(parts.train_loader.step_of(batches), 1)
    found = {piece.name: piece.gradient.clone() for piece in parts.pieces}
    module: Any = parts.model.module
    weight, losses, right = module.head.loss.score.weight, [], []
    for batch in batches:
        for tokens, labels, lengths in zip(batch["tokens"], batch["labels"], batch["document_lengths"], strict=True):
            own = lengths.tolist()
            for text, marks in zip(tokens.split(own), labels.split(own), strict=True):
                if len(text) == 0 or int(marks[-1]) < 0:
                    continue
                assert bool((marks[:-1] == -100).all())
                positions, keys = torch.arange(len(text))[None], torch.zeros(1, dtype=torch.int64)
                x = module.embedding(text[None], positions, keys)
                for block in module.blocks.values():
                    x = block(x, positions, keys)
                scores = weight @ module.head.norm(x)[0][0, -1]
                losses.append(F.cross_entropy(scores, marks[-1]))
                right.append(int(scores.argmax()) == int(marks[-1]))
    parts.model.sinks.begin_step()
    torch.stack(losses).sum().backward()
    whole = torch.cat([piece.gradient.flatten() for piece in parts.pieces]).norm()
    for piece in parts.pieces:
        assert float((found[piece.name] - piece.gradient).norm()) <= 1e-11 * float(whole), piece.name
    parts.stepper.forward_backward(parts.train_loader.step_of(batches), 1)
    result = parts.stepper.update(0.0, 0.0)
    mean = float(torch.stack(losses).detach().mean())
    assert (float(result.loss), int(result.tokens)) == (pytest.approx(mean, rel=1e-12), len(losses))
    assert float(result.statistics["accuracy"]) == pytest.approx(sum(right) / len(right), rel=1e-12)


@pytest.mark.wide("data")
def test_it_learns_the_length_of_texts() -> None:
    settings = {**TEXTS, "optimizer.lr": 0.01, "objectives.classify.init_std": 0.02}
    parts = build(tiny_run(settings))
    accuracies = []
    for step in range(1, 41):
        parts.stepper.forward_backward(parts.train_loader.take(4), step)
        accuracies.append(float(parts.stepper.update(0.01, 0.0).statistics["accuracy"]))
    assert sum(accuracies[-3:]) / 3 > 0.95
    assert sum(accuracies[:3]) / 3 < 0.8


REFUSED: dict[str, dict[str, Any]] = {
    r"data\.label_at=first has the label at the first one; set data\.label_at=last": {"data.label_at": "first"},
    "does not state that its labels are classes": {"data.name": "text"},
    "is none of the classes of the run": {"objectives.classify.labels": ["short", "long"]},
}


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """Fields of data belong to one plugin."""
    kept = {field: value for field, value in TEXTS.items() if "data.name" not in changes or "data." not in field}
    return {**kept, **changes}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_learned_is_refused(sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        build(tiny_run(changed(REFUSED[sentence])))


def test_a_label_at_the_end_needs_a_head_for_classes() -> None:
    alone = {field: value for field, value in TEXTS.items() if not field.startswith("objectives")}
    with pytest.raises(UsageError, match=r"data\.label_at=last is for data\.form=texts.*--objective classify"):
        tiny_run(alone)


def test_an_export_has_the_names_of_the_classes() -> None:
    shape = {"vocab_size": 260, "hidden_size": 16, "num_layers": 1, "num_attention_heads": 2, "ffn_hidden_size": 20}
    settings = {**TEXTS, "model.name": "llama", **{f"model.{name}": value for name, value in shape.items()}}
    run = tiny_run(settings)
    export = format_named("huggingface").format.export(run, build(run).model, ExportOptions(None, 1 << 30))
    assert isinstance(export, FolderExport)
    assert export.config["architectures"] == ["LlamaForSequenceClassification"]
    assert export.config["id2label"] == {"0": "short", "1": "long", "2": "other"}
    assert export.conversion.shape("score.weight") == (3, 16)
    assert "lm_head.weight" not in export.conversion.public
