"""A teacher's largest probabilities from a file: the formula, the live teacher's loss, layouts, and what is refused."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from mplug_distill.taught import Taught, fingerprint
from mplug_distill.top_file import Origin, TopFile, digest
from mplug_distill.top_writer import written
from safetensors import safe_open
from torch import Tensor

from mplug import IGNORED, UsageError
from mplug.model.build import build_model
from mplug.run.prepare import check_data
from mplug.training.assembly import Parts, build, build_loader
from mplug_nn.top_divergence import top_divergence
from mplug_nn.top_probabilities import token_top_probabilities as largest
from mplug_testing import CommandSuite
from mplug_testing.harness import as_rank, in_fp64, tiny_run, train_steps
from mplug_testing.parity import require_parity

V, LENGTH, SAMPLES = 259, 24, 32
SOURCES: dict[str, dict[str, Any]] = {
    "packed": {"name": "mock", "documents": 3},
    "whole": {"name": "mock"},
}


def taught(file: Path, source: str = "packed", **fields: Any) -> dict[str, Any]:
    return {
        "data.name": "taught",
        "data.of": SOURCES[source],
        "data.file": str(file),
        "data.validation_file": f"{file}-validation",
        "kernels.default": None,
        "model.vocab_size": V,
        "trainer.seq_length": LENGTH,
        "trainer.steps": 4,
        "optimizer.lr": 0.02,
        "objectives.distill.chunk": 10,
        **fields,
    }


def plain(source: str = "packed", **fields: Any) -> dict[str, Any]:
    """The same run without a teacher."""
    kept = {
        name: value for name, value in taught(Path(), source).items() if not name.startswith(("data", "objectives"))
    }
    return {**kept, **{f"data.{name}": value for name, value in SOURCES[source].items()}, **fields}


def written_by(
    logits_of: Any, path: Path, k: int, source: str = "packed", number: int = SAMPLES, **changes: Any
) -> Path:
    """Files in fp64 of the probabilities that `logits_of(batch)` [B, S, V] states, of both splits."""
    run = as_rank(tiny_run(in_fp64(plain(source))))
    for split, end in (("train", ""), ("validation", "-validation")):
        _write(build_loader(run, split), logits_of, Path(f"{path}{end}"), k, number, split, **changes)
    return path


def _write(loader: Any, logits_of: Any, path: Path, k: int, number: int, split: str, **changes: Any) -> None:
    fixed = {"k": k, "vocab_size": V, "tokenizer": None, "data": None, "split": split, "seed": 0}
    with written(path, Origin(**{**fixed, "seq_length": LENGTH, **changes}), "float64") as writer:
        for batch in loader.take(number):
            for row, (tokens, labels) in enumerate(zip(batch["tokens"].numpy(), batch["labels"].numpy(), strict=True)):
                top, logs = largest(logits_of(batch)[row][torch.from_numpy(labels) != IGNORED], k)
                writer.add(digest(tokens, labels), top.numpy(), logs.numpy())


def random_logits(batch: dict[str, Tensor]) -> Tensor:
    """[B, S, V], different for each token."""
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return 2 * table[batch["tokens"]]


@pytest.mark.parametrize("k", [1, 6, 11])
def test_the_divergence_and_its_gradient_are_those_of_the_formula(k: int) -> None:
    v, generator = 11, torch.Generator().manual_seed(k)
    logits, teacher = torch.randn(2, 2, 5, v, generator=generator, dtype=torch.float64).unbind()
    labels = torch.zeros(2, 5, dtype=torch.int64)
    labels[0, :2] = IGNORED
    tokens, logs = (one.unflatten(0, (2, 5)) for one in largest(teacher.flatten(0, 1), k))
    gradients = []
    for way in ("slot", "formula"):
        x = logits.clone().requires_grad_()
        if way == "slot":
            losses = top_divergence(x, lambda y: y, labels, tokens.long(), logs)
        else:
            p, q = x.softmax(dim=-1).gather(-1, tokens.long()), teacher.softmax(dim=-1).gather(-1, tokens.long())
            losses = (q * (q / p).log()).sum(dim=-1)
            if k < v:
                p, q = 1 - p.sum(dim=-1), 1 - q.sum(dim=-1)
                losses = losses + q * (q / p).log()
            losses = losses * (labels != IGNORED)
        (losses * torch.arange(10.0).view(2, 5)).sum().backward()
        gradients.append((losses.detach(), x.grad))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


TEACHER = {"name": "llama", "vocab_size": V, "num_layers": 1, "hidden_size": 24, "num_attention_heads": 2}
TEACHER |= {"ffn_hidden_size": 40, "init_std": 0.2}


def live_logits(parts: Parts, batch: dict[str, Tensor]) -> Tensor:
    """[B, S, V] of the teacher that runs beside the student."""
    module: Any = parts.model.module
    keys = torch.zeros(len(batch["tokens"]), dtype=torch.int64)
    with torch.no_grad():
        x = module.teacher.embedding(batch["tokens"], batch["positions"], keys)
        for block in module.teacher.blocks.values():
            x = block(x, batch["positions"], keys, document_lengths=batch["document_lengths"])
        head = module.head.loss.teacher.head
        logits: Tensor = head.project(head.norm(x)[0])
    return logits


def test_the_whole_vocabulary_in_a_file_teaches_what_the_live_teacher_does(tmp_path: Path) -> None:
    weight = {"objectives.distill.cross_entropy_weight": 0.25, "objectives.distill.chunk": 10}
    live = plain(**{**weight, "objectives.distill.teacher": TEACHER})
    parts = build(tiny_run(in_fp64(live)))
    file = written_by(lambda batch: live_logits(parts, batch), tmp_path / "whole", V)
    expected, found = (train_steps(in_fp64(one)) for one in (live, taught(file, **weight)))
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    figures = [[[*of_step.values()] for of_step in one.statistics] for one in (found, expected)]
    assert np.allclose(figures[0], figures[1], rtol=1e-12)
    for own, other in zip(found.gradients, expected.gradients, strict=True):
        assert own.keys() == other.keys()
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, other[name], rtol=1e-10, atol=1e-12)


LAYOUTS = ("tp2", "tp2 parallel.tp.sequence_parallel=false", "pp2 parallel.pp.schedule=zb-h1", "cp2", "dp2", "fsdp2")
LAYOUTS += ("zero2 parallel.zero.stage=2",)


@pytest.mark.wide("layouts", quick=["packed-tp2"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_layout_computes_what_one_process_does(layout: str, source: str, tmp_path: Path) -> None:
    """Chunks do not divide the sequence, and 259 tokens are an odd number to divide."""
    file = written_by(random_logits, tmp_path / "top", 5, source)
    require_parity(taught(file, source, **{"objectives.distill.cross_entropy_weight": 0.25}), layout)


CHANGES = {"micro batches of one": {"trainer.micro_batch_size": 1}, "compiled": {"trainer.compile": "aot_eager"}}


@pytest.mark.filterwarnings("ignore")  # of torch's tracer
@pytest.mark.wide("layouts", quick=[])
@pytest.mark.parametrize("change", CHANGES)
def test_neither_micro_batches_nor_a_compiler_change_a_result(change: str, tmp_path: Path) -> None:
    file = written_by(random_logits, tmp_path / "top", 5)
    found, expected = (train_steps(in_fp64(taught(file, **one))) for one in (CHANGES[change], {}))
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)


def test_a_file_has_what_was_written_and_is_safetensors(tmp_path: Path) -> None:
    file = written_by(random_logits, tmp_path / "top", 5, number=4)
    opened = TopFile(file, "data.file")
    with safe_open(file, framework="numpy") as other:
        for name in ("offsets", "digests", "tokens", "log_probabilities"):
            assert np.array_equal(other.get_tensor(name), getattr(opened, name)), name
    assert opened.log_probabilities.shape[1] == 6
    assert np.exp(opened.log_probabilities).sum(axis=1) == pytest.approx(1, rel=1e-12)
    assert {one.name for one in tmp_path.iterdir()} == {"top", "top-validation"}


def test_an_interrupted_file_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        written(tmp_path / "top", Origin(1, V, None, None, "train", 0, 4), "float32"),
    ):
        raise KeyboardInterrupt
    assert not [*tmp_path.iterdir()]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "has the probabilities of 300 tokens, and the student has 259": ({"vocab_size": 300}, {}),
    "was written with another tokenizer": ({"tokenizer": "other"}, {}),
    "sample 1 of the run is another one": ({}, {"trainer.seed": 5}),
    "it has 4 samples, and the run takes sample 5": ({}, {}),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_files_of_something_else_are_refused(sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_file, of_run = REFUSED[sentence]
    file = written_by(random_logits, tmp_path / "top", 2, number=4, **of_file)
    monkeypatch.setattr("mplug_distill.taught.fingerprint", lambda _: "own")
    with pytest.raises(UsageError, match=sentence):
        train_steps(in_fp64(taught(file, **of_run)))


def test_a_short_or_broken_file_is_refused_before_the_run_starts(tmp_path: Path) -> None:
    file = written_by(random_logits, tmp_path / "top", 2, number=4)
    with pytest.raises(UsageError, match=r"is too short: it has 4 samples, and trainer\.steps=4"):
        check_data(tiny_run(taught(file)))
    (tmp_path / "text").write_text("no file of this form")
    (tmp_path / "cut").write_bytes(file.read_bytes()[:-1])
    for name, sentence in {
        "text": "is no file of a teacher",
        "cut": "so it is not whole",
        "none": "No such file",
    }.items():
        with pytest.raises(UsageError, match=sentence):
            check_data(tiny_run(taught(tmp_path / name)))


WITHOUT: dict[str, dict[str, Any]] = {
    "divergence=reverse needs all probabilities": {"objectives.distill.divergence": "reverse"},
    "temperature needs all probabilities": {"objectives.distill.temperature": 2.0},
    "has two teachers": {"objectives.distill.teacher": TEACHER},
    "data.validation_file is null, and trainer.eval_every": {"trainer.eval_every": 1, "data.validation_file": None},
}


@pytest.mark.parametrize("sentence", WITHOUT)
def test_settings_that_a_file_does_not_serve_are_refused(sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        build_model(tiny_run(taught(Path("top"), **WITHOUT[sentence])))


def test_an_objective_without_any_teacher_is_refused() -> None:
    with pytest.raises(UsageError, match=r"objectives\.distill has no teacher: name the folder"):
        build_model(tiny_run(plain(**{"objectives.distill": {}})))


def test_a_tokenizer_has_another_fingerprint_if_it_makes_other_tokens() -> None:
    class Tokens:
        vocab_size, shift = V, 0

        def encode(self, text: str) -> list[int]:
            return [one + self.shift for one in text.encode()]

    other = Tokens()
    other.shift = 1
    assert fingerprint(None) is None
    assert fingerprint(Tokens()) == fingerprint(Tokens()) != fingerprint(other)


class TestTeach(CommandSuite):
    plugin = "teach"
    refused = (
        ("--output", "top"),
        ("--name", "nowhere", "--output", "top"),
        ("--pretrained", "nowhere", "--output", "top"),
        ("--pretrained", "nowhere", "--data", "text", "--output", "top"),
        ("--top", "0", "--output", "top"),
        ("--name", "nowhere"),
    )


def test_a_run_teaches_another_one_by_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A teacher is trained, writes its file, and a student of half its width learns from it."""
    from mplug.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("one two three four five six seven eight nine ten " * 40)
    own = ("trainer.seq_length=32", "trainer.eval_every=0", "trainer.device=cpu", "trainer.compile=never")
    own += ("model.num_layers=1", "trainer.global_batch_size=4", "trainer.steps=2", "kernels.default=null")
    common = [part for one in own for part in ("--set", one)]

    def call(*arguments: str) -> str:
        found = CliRunner().invoke(main, [*arguments])
        assert found.exit_code == 0, (found.output, found.exception)
        return found.output

    call("train", "--name", "t", *common, "--data", "text", "--set", "data.path=text.txt")
    wrong = CliRunner().invoke(main, ["teach", "--name", "t", "--top", "999", "--output", "f"])
    assert wrong.exit_code == 2
    assert "--top 999 is more than the 256 tokens of the model" in " ".join(wrong.output.split())
    output = call("teach", "--name", "t", "--device", "cpu", "--samples", "8", "--top", "8", "--output", "f")
    assert "8 samples with 256 targets" in output
    assert TopFile(tmp_path / "f", "data.file").origin.tokenizer is not None
    student = ("train", "--name", "s", *common, "--objective", "distill", "--data", "taught", "--set", "data.file=f")
    call(*student, "--set", "data.of={name: text, path: text.txt}")
    call("evaluate", "--name", "s", "--samples", "4")  # the validation split has no file, and needs none here
    shutil.copy("text.txt", "other.txt")
    with Path("other.txt").open("a") as file:
        file.write("eleven")
    other = CliRunner().invoke(
        main, [*student[:2], "u", *student[3:], "--set", "data.of={name: text, path: other.txt}"]
    )
    assert other.exit_code == 2
    assert "was written from other data" in " ".join(other.output.split())


def test_the_plugin_of_data_names_its_entries() -> None:
    run = tiny_run(taught(Path("top")))
    assert {"top_tokens", "top_log_probabilities", "document_lengths"} <= run.entries
    assert Taught.Config.model_fields["file"].is_required()
