"""A new run that begins with another run's weights, and with nothing else of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Cli
from safetensors.torch import load_file

from mplug.config.host_sections import Pretrained
from mplug.errors import UsageError
from mplug.run.prepare import prepare
from mplug.training.assembly import build
from mplug.training.loop import train
from mplug_pretrained.beginnings import about_weights
from mplug_pretrained.weights import load_weights, pretrained_of, refuse_another_model
from mplug_testing.harness import tiny_config

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
    (runs / "before").rename(runs / "gone")  # a resumed run needs it no more
    resumed = cli("train", "--resume", "--name", "after", "--set", "trainer.steps=3")
    assert resumed.returncode == 0, resumed.stderr
    assert "from step 2" in resumed.stdout
    (runs / "gone").rename(runs / "before")
    cut = cli("train", "--name", "cut", "--parallel", "tp2", *words[:-1], f"checkpoint.pretrained={begun}")
    assert cut.returncode == 0, cut.stderr
    assert first_loss(runs / "cut") == pytest.approx(first_loss(runs / "after"), rel=1e-5)
    assert first_loss(runs / "cut") != pytest.approx(first_loss(runs / "before"), rel=1e-3)


def test_what_cannot_be_begun_with_is_refused_before_launch(
    runs: Path, tiny: list[str], text_file: Path, cli: Cli
) -> None:
    words = [*tiny, "--set", f"data.path={text_file}", "--set", "checkpoint.pretrained=runs/before"]
    (runs / "empty" / "checkpoints").mkdir(parents=True)
    for change, sentence in (
        (
            "checkpoint.pretrained=runs/empty",
            "(--set): 'runs/empty' is not a checkpoint or the folder of a run with one",
        ),
        ("checkpoint.pretrained=runs/none", "'runs/none' does not exist; mplug downloads nothing"),
        ("model.hidden_size=48", "but the model has (256, 48); use the model config of the checkpoint"),
        ("model.num_layers=3", "has no parameter 'blocks.2."),
        ("model.num_layers=3", "use the settings of its own model (mplug train runs/before/config.yaml ...), or name"),
        ("model.num_layers=1", "which the model lacks; use a checkpoint of this model"),
    ):
        result = cli("train", "--name", "refused", *words, "--set", change)
        assert result.returncode == 2
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert sentence in result.stderr
        assert not (runs / "refused").exists()


LORA: dict[str, Any] = {"adapters.lora.rank": 2, "adapters.lora.targets": ["attention"]}


ONE_BLOCK = {"model.num_layers": 1, "trainer.precision": "fp32", "trainer.steps": 1, "trainer.eval_every": 0}


def saved(folder: Path, settings: dict[str, Any]) -> None:
    train(prepare(tiny_config({**ONE_BLOCK, **settings}), directory=folder))


def begun(folder: Path, settings: dict[str, Any], **pretrained: Any) -> tuple[list[str], dict[str, torch.Tensor]]:
    """(what the start of a run says about its weights, the weights that they change), without training it."""
    run = prepare(tiny_config({**ONE_BLOCK, **settings}))
    section = Pretrained(path=str(folder), **pretrained)
    run.config = replace(run.config, checkpoint=run.config.checkpoint.model_copy(update={"pretrained": section}))
    path, parts = pretrained_of(run), build(run)
    assert path is not None
    refuse_another_model(path, parts.model, section)
    lines = about_weights(run, parts.model, path)
    initial = {one.name: one.values.clone() for one in parts.held()}
    load_weights(run, parts.model, parts.pieces, path)
    return lines, {one.name: one.values for one in parts.held() if (one.values != initial[one.name]).any()}


def test_patterns_choose_the_weights_of_another_run(tmp_path: Path) -> None:
    """What they leave out keeps its initial values; without them, a larger checkpoint is refused."""
    saved(tmp_path, {"model.num_layers": 2})
    _, changed = begun(tmp_path, {}, only=["blocks", "head"], **{"except": ["blocks.1", "blocks.*.mlp"]})
    block = {f"blocks.0.attn.{name}.weight" for name in ("qkv", "out")}
    assert {name for name in changed if "norm" not in name} == {*block, "head.project.weight"}
    with pytest.raises(UsageError, match=r"has the parameter 'blocks.1.*which the model lacks"):
        begun(tmp_path, {}, only=["blocks"])
    with pytest.raises(UsageError, match=r"checkpoint.pretrained.only: no parameter or module matches 'block'"):
        begun(tmp_path, {}, only=["block"])


def test_adapters_begin_anew_or_with_those_of_a_run_that_computes_the_same(tmp_path: Path) -> None:
    base, adapted = tmp_path / "base", tmp_path / "adapted"
    saved(base, {})
    saved(adapted, LORA)
    b, stabilized = "blocks.0.attn.out.adapter.b0.weight", "adapters.lora.rank_stabilized"
    lines, anew = begun(base, LORA)
    assert (lines, b in anew) == ([], False)
    lines, loaded = begun(adapted, {**LORA, "adapters.lora.dropout": 0.1, "model.norm_eps": 1e-3})
    assert lines == ["the run of the weights had other settings: model.norm_eps: 1e-05 -> 0.001"]
    assert loaded[b].any()
    with pytest.raises(UsageError, match=f"has adapters that were trained with other settings .{stabilized}: "):
        begun(adapted, {**LORA, stabilized: True})
    lines, anew = begun(adapted, {**LORA, stabilized: True}, **{"except": ("blocks.*.attn.*.adapter",)})
    assert (lines, b in anew) == ([], False)
