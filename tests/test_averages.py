"""Averages of the weights (`optimizer.average`): their values, layouts, checkpoints, evaluations and exports.

The set `pairs` compares further layouts with one process; `test_optimizers.py` resumes averages under other layouts.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tiny_models
import torch
from click.testing import CliRunner
from tiny_runs import position_of
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mplug import UsageError
from mplug.cli import main
from mplug.contracts.optimizer import AVERAGE
from mplug.model.build import build_model
from mplug.run.prepare import prepare
from mplug.training.assembly import Parts, build
from mplug.training.loop import train
from mplug_estimates import measure_bytes
from mplug_saving.folder import newest
from mplug_saving.position import Position
from mplug_testing.harness import EXACT, as_rank, tiny_config, tiny_run
from mplug_validation import evaluate, evaluated_in_place

LR, DECAY, STEPS = 1e-2, 0.1, 6
HALF: dict[str, Any] = {"optimizer.average": {"decay": 0.5}}
FP64: dict[str, Any] = {"trainer.precision": "fp64", "trainer.eval_every": 0, "checkpoint.asynchronous": False}


def step(parts: Parts, number: int, lr: float = LR) -> None:
    parts.stepper.forward_backward(parts.train_loader.take(8), number)
    parts.stepper.update(lr, DECAY)


def average_of(parts: Parts) -> dict[str, Tensor]:
    found = {}
    for piece in parts.pieces:
        average = parts.optimizer.state(piece)[AVERAGE]
        assert isinstance(average, Tensor)
        found[piece.name] = average
    return found


@pytest.mark.parametrize(
    ("section", "reference"),
    [({"decay": 0.75}, {"multi_avg_fn": get_ema_multi_avg_fn(0.75)}), ({"decay": None, "start": 2}, {})],
    ids=["exponential", "mean"],
)
def test_the_average_is_that_of_torch(section: dict[str, Any], reference: dict[str, Any]) -> None:
    parts = build(tiny_run({**FP64, "optimizer.average": section}))
    masters = nn.ParameterList([nn.Parameter(piece.master) for piece in parts.pieces])
    averaged = AveragedModel(masters, **reference)
    for number in range(1, STEPS + 1):
        step(parts, number)
        for mine, piece in zip(masters, parts.pieces, strict=True):
            mine.data.copy_(piece.master)
        if number > section.get("start", 0):
            averaged.update_parameters(masters)
            for found, expected in zip(average_of(parts).values(), averaged.module, strict=True):
                torch.testing.assert_close(found, expected.data, rtol=EXACT, atol=EXACT)
        else:
            assert all(torch.equal(average_of(parts)[piece.name], piece.master) for piece in parts.pieces)


def test_a_skipped_step_moves_no_average() -> None:
    parts = build(tiny_run({**HALF, "trainer.nonfinite": "skip"}))
    step(parts, 1)
    step(parts, 2)
    before = {name: one.clone() for name, one in average_of(parts).items()}
    parts.stepper.forward_backward(parts.train_loader.take(8), 3)
    parts.pieces[0].gradient.fill_(torch.inf)
    assert parts.stepper.update(LR, DECAY).skipped == 1
    assert all(torch.equal(one, before[name]) for name, one in average_of(parts).items())


def test_an_evaluation_computes_with_averages_and_then_training_goes_on_as_if_it_had_not_been() -> None:
    settings = {**HALF, "trainer.precision": "bf16", "trainer.eval_every": 100}
    watched, plain = build(run := tiny_run(settings)), build(tiny_run(settings))
    weights = build(tiny_run({**settings, "trainer.eval_averages": False}))
    for number in range(1, 4):
        step(watched, number, lr=0.125)
        loss = evaluate(run, watched)
        step(plain, number, lr=0.125)
    for mine, piece in zip(weights.pieces, plain.pieces, strict=True):
        mine.master.copy_(average_of(plain)[piece.name])
        assert mine.weight is not None
        mine.weight.copy_(mine.master)
    weights.model.weights_written()
    assert loss == evaluate(tiny_run({**settings, "trainer.eval_averages": False}), weights)
    assert loss != evaluate(tiny_run({**settings, "trainer.eval_averages": False}), plain)
    for mine, piece in zip(watched.pieces, plain.pieces, strict=True):
        assert torch.equal(mine.master, piece.master)
        assert mine.weight is not None
        assert piece.weight is not None
        assert torch.equal(mine.weight, piece.weight)
        assert torch.equal(average_of(watched)[piece.name], average_of(plain)[piece.name])


EXPERTS: dict[str, Any] = {**tiny_models.EXPERTS, **HALF}


# Checkpoints.


def begun(settings: dict[str, Any], directory: Path) -> None:
    """Be one rank that saves after three steps."""
    position = position_of({**FP64, **settings}, directory)
    for number in range(1, 4):
        position.run.step = number
        step(position.parts, number)
    position.save()


def test_commands_use_the_averages_that_the_run_evaluates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {
        "model.name": "llama",
        "model.ffn_hidden_size": 48,
        "model.num_layers": 2,
        "model.hidden_size": 32,
        "model.num_attention_heads": 4,
        "model.num_kv_heads": 2,
        "model.vocab_size": 259,
        "optimizer.lr": LR,
        "trainer.steps": 3,
        "trainer.eval_every": 100,
        "schedule.warmup_steps": 0,
        **HALF,
    }
    run = prepare(tiny_config(settings), directory=tmp_path / "runs" / "one")
    train(run)
    path = newest(run.checkpoints)
    assert path is not None
    saved: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        saved |= safetensors.torch.load_file(file)
    again = as_rank(prepare(tiny_config(settings), directory=tmp_path / "again"))
    again.device = "cpu"
    position = Position(again, build(again))
    position.load(position.choose(path))
    val_loss = evaluate(again, position.parts)
    losses = {}
    for word in ("true", "false"):
        file = str(tmp_path / f"{word}.json")
        done = CliRunner().invoke(main, ["evaluate", "--output", file, "--set", f"trainer.eval_averages={word}"])
        assert done.exit_code == 0, done.output
        found = json.loads(Path(file).read_text())
        assert found["averages"] == ("of the averages of the weights in" in done.output) == (word == "true")
        losses[word] = found["total"]["loss"]
    assert losses["true"] == pytest.approx(val_loss, rel=1e-6)
    assert losses["false"] != pytest.approx(val_loss, rel=1e-6)
    for word, state in ((), AVERAGE), (("--weights",), "weight"):
        folder = f"exported-{state}"
        done = CliRunner().invoke(main, ["checkpoint", "export", "--to", "huggingface", folder, *word])
        assert done.exit_code == 0, done.output
        exported = safetensors.torch.load_file(tmp_path / folder / "model.safetensors")
        assert ("the weights, not averages" if word else "the averages of the weights") in done.output
        (key,) = (key for key in saved if key.startswith(f"embedding.token.weight/{state}"))
        assert torch.equal(exported["model.embed_tokens.weight"], saved[key])


def test_an_export_of_averages_that_no_checkpoint_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"model.name": "llama", "model.ffn_hidden_size": 48, "model.num_kv_heads": 2, "trainer.steps": 1}
    sizes = {"model.num_layers": 1, "model.hidden_size": 32, "model.num_attention_heads": 4, "model.vocab_size": 259}
    train(prepare(tiny_config({**settings, **sizes}), directory=tmp_path / "runs" / "one"))
    done = CliRunner().invoke(main, ["checkpoint", "export", "--to", "huggingface", "folder", "--averages"])
    assert (done.exit_code, Path("folder").exists()) == (2, False)
    assert "has no averages of the weights; remove the option" in done.stderr


def test_explain_shows_the_updates() -> None:
    words = ["explain", "--optimizer", "muon", "--lr", "0.02", "optimizer.average={decay: 0.9, start: 5}"]
    shown = CliRunner().invoke(main, [*words, "schedule.name=wsd_sqrt", "schedule.decay_steps=20"])
    line = shown.output.partition("Updates\n")[2].splitlines()[1]
    assert line.split() == [
        "optimizers/muon",
        "0.02",
        "0.1",
        "wsd_sqrt",
        "50",
        "20",
        "0",
        "decay",
        "0.9,",
        "from",
        "update",
        "5",
    ]


def test_a_run_that_begins_with_another_one_begins_with_its_averages(tmp_path: Path) -> None:
    run = prepare(tiny_config({**HALF, "trainer.steps": 2, "optimizer.lr": LR}), directory=tmp_path / "first")
    train(run)
    opened = {}
    path = newest(run.checkpoints)
    assert path is not None
    for file in path.glob("*.safetensors"):
        opened |= safetensors.torch.load_file(file)
    idle = {"trainer.steps": 1, "optimizer.lr": 1e-30, "optimizer.weight_decay": 0.0}
    second = prepare(
        tiny_config({**idle, "checkpoint.pretrained": str(tmp_path / "first")}), directory=tmp_path / "second"
    )
    train(second)
    path = newest(second.checkpoints)
    assert path is not None
    for file in path.glob("*.safetensors"):
        for key, tensor in safetensors.torch.load_file(file).items():
            if "/weight" in key:
                assert torch.equal(tensor, opened[key.replace("/weight", f"/{AVERAGE}")]), key


# Memory and refusals.


def test_an_average_costs_a_value_and_each_piece_a_number() -> None:
    one, other = (measure_bytes(run, build_model(run)) for run in (tiny_run(HALF), tiny_run({})))
    placements = build_model(tiny_run({})).placements.values()
    added = 4 * (sum(placement.numel for placement in placements) + len(placements))
    assert one["optimizer state"] - other["optimizer state"] == added


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"optimizer.average": {"decay": 1}}, r"optimizer\.average\.decay"),
        ({"optimizer.average": {"rate": 1}}, r"optimizer\.average\.rate"),
        ({"optimizer.average": 0.9}, r"optimizer\.average"),
    ],
)
def test_wrong_fields_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        tiny_run(settings)


def test_a_resumed_run_keeps_its_average(tmp_path: Path) -> None:
    begun(HALF, tmp_path)
    path = newest(tmp_path / "checkpoints")
    assert path is not None
    other = position_of({**FP64, "optimizer.average": {"decay": 0.75}}, tmp_path)
    with pytest.raises(UsageError, match=r"optimizer\.average.*0\.5.*0\.75"):
        other.load(other.choose(path))
    without = position_of(FP64, tmp_path)
    with pytest.raises(UsageError, match=r"optimizer\.average"):
        without.load(without.choose(path))
    without.load(without.choose(path), ("optimizer.average",))


def test_an_average_of_an_optimizer_that_keeps_one_is_refused() -> None:
    with pytest.raises(UsageError, match=r"optimizer\.average: optimizers/schedulefree, .* keeps averages itself"):
        build(tiny_run({**HALF, "optimizer.name": "schedulefree"}))


def test_an_evaluation_of_a_group_with_averages_leaves_the_other_weights_as_they_are() -> None:
    group = {"match": "blocks", "optimizer": {"name": "schedulefree", "lr": LR}}
    run = tiny_run({**FP64, "optimizer.groups": [group]})
    parts = build(run)
    for number in range(1, 4):
        step(parts, number)
    trained = {piece.name: piece.master.clone() for piece in parts.pieces}
    with evaluated_in_place(run, parts):
        for piece in parts.pieces:
            state = parts.optimizer.state(piece)
            assert (AVERAGE in state) == (piece.name in parts.model.groups)
            assert torch.equal(piece.master, trained[piece.name]) == (AVERAGE not in state)
    assert all(torch.equal(piece.master, trained[piece.name]) for piece in parts.pieces)
