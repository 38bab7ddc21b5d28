"""A new run that begins with another run's weights, and with nothing else of it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mplug.checkpoint.pretrained import load_weights, pretrained_of, refuse_another_model
from mplug.cli.beginning import about_weights
from mplug.config.host_sections import Pretrained
from mplug.errors import UsageError
from mplug.run.prepare import prepare
from mplug.training.assembly import build
from mplug.training.loop import train
from mplug_testing.harness import tiny_config

Cli = Callable[..., CompletedProcess[str]]
SAVING = ("--set", "trainer.steps=2")


def saved_weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    """The logical weights that one process has saved."""
    (path,) = (run / "checkpoints" / f"step_{step:08d}").glob("*.safetensors")
    return {name: tensor for name, tensor in load_file(path).items() if "/weight" in name}


def first_loss(run: Path) -> float:
    return float(json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["loss"])


def record(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "record.json").read_text()))


@pytest.fixture
def runs(tmp_path: Path, tiny: list[str], text_file: Path, cli: Cli) -> Path:
    """A folder with a run 'before' of two steps."""
    result = cli("train", "--name", "before", *tiny, "--set", f"data.path={text_file}", *SAVING)
    assert result.returncode == 0, result.stderr
    return tmp_path / "runs"


def test_a_run_begins_with_the_weights_of_another_under_any_layout(
    runs: Path, tiny: list[str], text_file: Path, cli: Cli
) -> None:
    """With a learning rate of nearly 0 its own checkpoint has those weights still; its step and data are new."""
    words = [*tiny, "--set", f"data.path={text_file}", *SAVING, "--set", "checkpoint.pretrained=runs/before"]
    still = ("--set", "optimizer.lr=1e-30")
    result = cli("train", "--name", "after", *words, *still)
    assert result.returncode == 0, result.stderr
    begun = runs / "before" / "checkpoints" / "step_00000002"
    assert f"with the weights of 'runs/before/checkpoints/{begun.name}'" in result.stdout
    found, expected = saved_weights(runs / "after", 2), saved_weights(runs / "before", 2)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert record(runs / "after")["pretrained"] == f"runs/before/checkpoints/{begun.name}"
    cut = cli("train", "--name", "cut", "--parallel", "tp2", *words[:-1], f"checkpoint.pretrained={begun}")
    assert cut.returncode == 0, cut.stderr
    assert first_loss(runs / "cut") == pytest.approx(first_loss(runs / "after"), rel=1e-5)
    assert first_loss(runs / "cut") != pytest.approx(first_loss(runs / "before"), rel=1e-3)


def test_a_resumed_run_needs_them_no_more(runs: Path, tiny: list[str], text_file: Path, cli: Cli) -> None:
    words = [*tiny, "--set", f"data.path={text_file}", *SAVING, "--set", "checkpoint.pretrained=runs/before"]
    assert cli("train", "--name", "after", *words).returncode == 0
    (runs / "before").rename(runs / "gone")
    result = cli("train", "--resume", "--name", "after", "--set", "trainer.steps=3")
    assert result.returncode == 0, result.stderr
    assert "from step 2" in result.stdout


def test_what_cannot_be_begun_with_is_refused_before_launch(
    runs: Path, tiny: list[str], text_file: Path, cli: Cli
) -> None:
    words = [*tiny, "--set", f"data.path={text_file}", "--set", "checkpoint.pretrained=runs/before"]
    (runs / "empty" / "checkpoints").mkdir(parents=True)
    for changes, sentence in (
        (
            ("checkpoint.pretrained=runs/empty",),
            "(--set): 'runs/empty' is not a checkpoint or the folder of a run with one",
        ),
        (("checkpoint.pretrained=runs/none",), "'runs/none' does not exist; mplug downloads nothing"),
        (("model.hidden_size=48",), "but the model has (256, 48); use the model config of the checkpoint"),
        (("model.num_layers=3",), "has no parameter 'blocks.2."),
        (("model.num_layers=1",), "which the model lacks; use a checkpoint of this model"),
    ):
        given = [word for change in changes for word in ("--set", change)]
        result = cli("train", "--name", "refused", *words, *given)
        assert result.returncode == 2
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert sentence in result.stderr
        assert not (runs / "refused").exists()


def test_patterns_choose_the_weights_of_another_run(tmp_path: Path) -> None:
    """What they leave out keeps its initial values; without them, a larger checkpoint is refused."""

    def begun(layers: int, **pretrained: Any) -> dict[str, torch.Tensor]:
        run = prepare(
            tiny_config({"trainer.steps": 1, "trainer.precision": "fp32", "model.num_layers": layers}),
            directory=tmp_path / str(layers),
        )
        if not pretrained:
            train(run)
            return {}
        section = Pretrained(path=str(tmp_path / "2"), **pretrained)
        checkpoint = run.config.checkpoint.model_copy(update={"pretrained": section})
        run.config = replace(run.config, checkpoint=checkpoint)
        path = pretrained_of(run)
        assert path is not None
        parts = build(run)
        refuse_another_model(path, parts.model, section)
        initial = {one.name: one.values.clone() for one in parts.held()}
        load_weights(run, parts.model, parts.pieces, path)
        return {one.name: one.values != initial[one.name] for one in parts.held()}

    begun(2)
    changed = begun(1, only=["blocks", "head"], **{"except": ["blocks.1", "blocks.*.mlp"]})
    moved = {name for name, elements in changed.items() if elements.any()}
    assert {name for name in moved if "norm" not in name} == {
        "blocks.0.attn.qkv.weight",
        "blocks.0.attn.out.weight",
        "head.project.weight",
    }
    with pytest.raises(UsageError, match=r"has the parameter 'blocks.1.*which the model lacks"):
        begun(1, only=["blocks"])
    with pytest.raises(UsageError, match=r"checkpoint.pretrained.only: no parameter or module matches 'block'"):
        begun(1, only=["block"])


LORA: dict[str, Any] = {"adapters.lora.rank": 2, "adapters.lora.targets": ["attention"]}


def begun(folder: Path, settings: dict[str, Any], **pretrained: Any) -> tuple[list[str], dict[str, torch.Tensor]]:
    """(what the start of a run says about its weights, its values after loading), without training it."""
    run = prepare(tiny_config({"model.num_layers": 1, "trainer.precision": "fp32", **settings}))
    section = Pretrained(path=str(folder), **pretrained)
    run.config = replace(run.config, checkpoint=run.config.checkpoint.model_copy(update={"pretrained": section}))
    path, parts = pretrained_of(run), build(run)
    assert path is not None
    refuse_another_model(path, parts.model, section)
    lines = about_weights(run, parts.model, path)
    load_weights(run, parts.model, parts.pieces, path)
    return lines, {one.name: one.values for one in parts.held()}


def test_adapters_begin_anew_or_with_those_of_a_run_that_computes_the_same(tmp_path: Path) -> None:
    base, adapted = tmp_path / "base", tmp_path / "adapted"
    for directory, settings in ((base, {}), (adapted, LORA)):
        saving = {"model.num_layers": 1, "trainer.precision": "fp32", "trainer.steps": 1, "trainer.eval_every": 0}
        train(prepare(tiny_config({**saving, **settings}), directory=directory))
    b, stabilized = "blocks.0.attn.out.adapter.b0.weight", "adapters.lora.rank_stabilized"
    lines, anew = begun(base, LORA)
    assert lines == []
    assert not anew[b].any()
    lines, loaded = begun(adapted, {**LORA, "adapters.lora.dropout": 0.1, "model.norm_eps": 1e-3})
    assert lines == ["the run of the weights had other settings: model.norm_eps: 1e-05 -> 0.001"]
    assert loaded[b].any()
    with pytest.raises(UsageError, match=f"has adapters that were trained with other settings .{stabilized}: "):
        begun(adapted, {**LORA, stabilized: True})
    lines, anew = begun(adapted, {**LORA, stabilized: True}, **{"except": ("blocks.*.attn.*.adapter",)})
    assert lines == []
    assert not anew[b].any()
