"""What a resumed run may change: free, refused, allowed by name; logged, and kept in records and checkpoints."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mplug import UsageError
from mplug.cli import main
from mplug.run.prepare import prepare
from mplug.run.record import provenance
from mplug_saving.changes import FINGERPRINT, Changes, changes_on_resume, refuse_unknown_fields
from mplug_saving.folder import read_manifest
from mplug_testing.harness import tiny_config
from mplug_testing.runs import trained

PATH = Path("runs/first/checkpoints/step_00000010")


def manifest_of(settings: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """What a checkpoint of a run with these settings holds of them."""
    run = prepare(tiny_config(settings))
    varies = {label: variance.reason for label, variance in run.variances.items()}
    manifest = {"step": 10, "config": run.config.resolved(), "provenance": provenance(run), "varies": varies, **facts}
    return json.loads(json.dumps(manifest))


def changes(before: dict[str, Any], after: dict[str, Any], *allowed: str, **facts: Any) -> Changes:
    """What a run with settings `after` changes of a checkpoint of one with settings `before`."""
    return changes_on_resume(PATH, manifest_of(before, **facts), prepare(tiny_config(after)), allowed)


FREE = [
    {"trainer.micro_batch_size": 1},
    {"parallel.layout": "tp2pp2"},
    {"parallel.layout": "zero2", "parallel.zero.stage": 2},
    {"parallel.data": "zero", "parallel.layout": "tp2"},
    {"kernels.default": None},
    {"kernels.attention": "reference"},
    {"kernels.sdpa.backend": "math"},
    {"memory.recompute.mode": "full"},
    {"checkpoint.every": 3, "checkpoint.keep": 5, "checkpoint.asynchronous": False},
    {"trainer.compile": "aot_eager", "trainer.device": "auto", "trainer.deterministic": True},
    {"trainer.eval_every": 7, "trainer.eval_samples": 16, "trainer.log_every": 3, "trainer.nonfinite": "skip"},
]


@pytest.mark.parametrize("after", FREE, ids=lambda settings: " ".join(settings))
def test_what_no_loss_depends_on_may_change_and_is_told(after: dict[str, Any]) -> None:
    told = [line.partition(":")[0] for line in changes({}, after).lines()]
    assert told
    untold = [name for name in after if not any(name.startswith(field) for field in told)]
    assert untold in ([], ["parallel.zero.stage"]), "the option of a strategy that was not there"


def test_another_number_of_steps_tells_the_learning_rate_that_follows() -> None:
    schedule = {"schedule.name": "cosine", "schedule.warmup_steps": 0, "optimizer.lr": 1e-2}
    told = changes({**schedule, "trainer.steps": 10}, {**schedule, "trainer.steps": 22}).lines()
    assert told == [
        "trainer.steps: 10 -> 22",
        "the learning rate of step 11 is 0.005; with the checkpoint's settings it was 0",
    ]


def test_a_schedule_that_is_no_longer_installed_is_not_compared() -> None:
    settings = {"schedule.warmup_steps": 0}
    manifest = manifest_of(settings)
    manifest["config"]["schedule"]["name"] = "halves"
    found = changes_on_resume(PATH, manifest, prepare(tiny_config(settings)), ("schedule.name",))
    (line,) = found.effects
    assert line.startswith("the checkpoint's schedule cannot be compared: no learning rate schedule is named 'halves'")


COURSE = {
    "optimizer.lr": 1e-4,
    "optimizer.beta2": 0.99,
    "trainer.seed": 7,
    "trainer.global_batch_size": 16,
    "trainer.seq_length": 32,
    "trainer.precision": "bf16",
    "trainer.max_grad_norm": 0.5,
    "trainer.gradients": "masters",
    "trainer.loss_scale.initial": 2.0,
    "schedule.name": "cosine",
    "schedule.warmup_steps": 5,
    "schedule.weight_decay.end": 0.2,
    "schedule.batch_rampup.increment": 2,
    "model.dropout": 0.1,
    "model.num_layers": 2,
    "data.documents": 2,
}


@pytest.mark.parametrize("field", COURSE)
def test_what_decides_how_training_goes_on_is_refused_unless_it_is_allowed_by_name(field: str) -> None:
    after = {field: COURSE[field]}
    with pytest.raises(UsageError) as caught:
        changes({}, after)
    (line,) = [line for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert line.startswith(f"  {field}: ")
    assert f" -> {COURSE[field]} (the suite's settings)" in line
    assert str(PATH) in str(caught.value)
    assert f"add --allow-change {field}\n" in str(caught.value)
    for allowed in (field, field.split(".")[0]):
        assert any(line.endswith("(--allow-change)") for line in changes({}, after, allowed).lines())


def test_all_changes_are_refused_at_once_and_a_field_is_no_permission_for_another() -> None:
    after = {"optimizer.lr": 1e-4, "trainer.seed": 7, "trainer.steps": 200}
    for allowed, remedy in (
        ((), r"add --allow-change optimizer\.lr,trainer\.seed\n"),
        (("optimizer.lr",), r"add --allow-change trainer\.seed\n"),
        (("trainer.seed", "optimizer.lr_scale"), r"optimizer\.lr"),
    ):
        with pytest.raises(UsageError, match=remedy):
            changes({}, after, *allowed)


def test_another_optimizer_is_refused_as_a_section_with_the_values_that_change() -> None:
    after = {"optimizer.name": "sgd", "optimizer.weight_decay": 0.0}
    with pytest.raises(UsageError) as caught:
        changes({}, after)
    for words in ("optimizer.name: adamw -> sgd", "optimizer.weight_decay: 0.1 -> 0.0", "--allow-change optimizer\n"):
        assert words in str(caught.value)
    assert "beta1" not in str(caught.value)
    assert "optimizer.name: adamw -> sgd (--allow-change)" in changes({}, after, "optimizer").lines()


def test_a_plugin_of_another_distribution_is_another_plugin_and_another_version_is_told() -> None:
    manifest = manifest_of({})
    plugins = {plugin["plugin"]: plugin for plugin in manifest["provenance"]["plugins"]}
    plugins["models/gpt"]["version"] = "0.0.9"
    manifest["provenance"]["torch"] = "2.0"
    run = prepare(tiny_config({}))
    told = changes_on_resume(PATH, manifest, run, ()).lines()
    assert "models/gpt: mplug-gpt 0.0.9 -> mplug-gpt 0.1.0" in told
    assert any(line.startswith("torch: 2.0 -> ") for line in told)
    plugins["optimizers/adamw"]["distribution"] = "acme-optimizers"
    with pytest.raises(UsageError, match=r"optimizer\.name: adamw of acme-optimizers -> adamw"):
        changes_on_resume(PATH, manifest, run, ())


ADAMW = {"optimizer.lr": 1e-3, "optimizer.weight_decay": 0.0}
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"optimizer.name": "adamw", **ADAMW}, {"optimizer.name": "mplug-adamw/adamw", **ADAMW}),
    ({"parallel.zero.reduce_dtype": "fp32"}, {"parallel.zero.reduce_dtype": "bf16"}),  # of an unused plugin
]


@pytest.mark.parametrize(("before", "after"), SAME, ids=["nothing", "a long name", "a plugin that is not used"])
def test_what_changes_nothing_is_not_told(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert changes(before, after).lines() == []


def test_a_field_of_a_third_partys_plugin_is_refused_until_the_plugin_says_that_it_may_change(
    plant: Callable[..., None],
) -> None:
    before, after = ({"kernels.attention": "ringo", "kernels.ringo.block": block} for block in (4, 8))
    plant("nova-ringo")
    with pytest.raises(UsageError, match=r"kernels.ringo.block: 4 -> 8 .*: kernels/ringo does not declare"):
        changes(before, after)
    assert changes(before, after, "kernels.ringo").lines() == ["kernels.ringo.block: 4 -> 8 (--allow-change)"]
    marked = '__import__("typing").Annotated[PositiveInt, __import__("mplug").MAY_CHANGE]'
    plant("nova-ringo", "block: PositiveInt", f"block: {marked}")
    assert changes(before, after).lines() == ["kernels.ringo.block: 4 -> 8"]


def test_every_field_of_an_observer_may_change(plant: Callable[..., None]) -> None:
    plant("nova-plotter")
    before, after = ({"extensions.plotter.every": every} for every in (2, 3))
    assert changes(before, after).lines() == ["extensions.plotter.every: 2 -> 3"]
    assert changes(before, {}).lines() == ["extensions.plotter: used -> not used"]
    assert changes(before, {"extensions.plotter": False}).lines() == ["extensions.plotter: used -> not used"]


def test_fields_that_are_newer_than_the_checkpoint_have_their_defaults() -> None:
    manifest = manifest_of({})
    for section, field in (("trainer", "deterministic"), ("optimizer", "beta2"), ("model", "rope_theta")):
        del manifest["config"][section][field]
    del manifest["config"]["model"]["frozen"]
    assert changes_on_resume(PATH, manifest, prepare(tiny_config({})), ()).lines() == []
    with pytest.raises(UsageError, match=r"optimizer.beta2: 0.95 -> 0.9 "):
        changes_on_resume(PATH, manifest, prepare(tiny_config({"optimizer.beta2": 0.9})), ())
    with pytest.raises(UsageError, match="does not hold the config"):
        changes_on_resume(PATH, {"step": 3}, prepare(tiny_config({})), ())


@pytest.mark.parametrize(("before", "after"), [("squeeze2", "dp2"), ("", "squeeze2"), ("squeeze2", "squeeze1")])
def test_a_strategy_that_varies_is_refused_where_it_comes_or_goes(
    plant: Callable[..., None], before: str, after: str
) -> None:
    plant("acme-squeeze")
    layouts = [{"parallel.layout": word} for word in (before, after)]
    with pytest.raises(UsageError, match=r"parallel.squeeze: .*gradients are rounded to bf16"):
        changes(*layouts)
    assert changes(*layouts, "parallel.squeeze").lines()
    assert changes({"parallel.layout": "squeeze2"}, {"parallel.layout": "squeeze4"}).lines()


def test_the_precision_of_a_strategys_sums_is_one_change_and_its_buckets_are_free() -> None:
    before = {"parallel.layout": "zero2"}
    with pytest.raises(UsageError, match=r"--allow-change parallel\.zero\.reduce_dtype\n"):
        changes(before, {**before, "parallel.zero.reduce_dtype": "bf16"})
    assert changes(before, {**before, "parallel.zero.bucket_mib": 1.0}).lines()


def test_an_unknown_name_is_refused_with_did_you_mean() -> None:
    config = tiny_config({})
    for name, close in (("optimizer.lrr", "optimizer.lr"), ("optimzer", "optimizer")):
        with pytest.raises(UsageError, match=f"--allow-change '{name}': .*; did you mean '{close}'"):
            refuse_unknown_fields(manifest_of({}), config, (name,))
    refuse_unknown_fields(manifest_of({}), config, ("optimizer.lr", "schedule", "trainer.loss_scale.initial"))


# Data.


@pytest.fixture
def text_run(text_file: Path, tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """The settings of a run on a text, and its checkpoint of step 1."""
    settings = {"data.name": "text", "data.path": str(text_file), "trainer.steps": 1, "trainer.eval_every": 0}
    (checkpoint,) = trained(tiny_config(settings), tmp_path / "run").saved
    return {**settings, "trainer.steps": 2}, checkpoint


def test_data_may_move_while_it_stays_the_same(text_run: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    settings, checkpoint = text_run
    moved = shutil.move(settings["data.path"], tmp_path / "moved.txt")
    witness = trained(tiny_config({**settings, "data.path": str(moved)}), tmp_path / "run", resume_from=checkpoint)
    assert list(witness.figures) == [2]
    assert "data.path" in (tmp_path / "run" / "logs" / "rank0.log").read_text()


@pytest.mark.parametrize("path", ["text.txt", "other.txt"])
def test_other_data_is_refused_wherever_it_is(text_run: tuple[dict[str, Any], Path], tmp_path: Path, path: str) -> None:
    settings, checkpoint = text_run
    other = tmp_path / path
    other.write_text(Path(settings["data.path"]).read_text().replace("1 times 1 is 1", "1 times 1 is 2"))
    config = tiny_config({**settings, "data.path": str(other)})
    with pytest.raises(UsageError, match=r"the training data differs in content .* --allow-change data"):
        trained(config, tmp_path / "run", resume_from=checkpoint)
    trained(config, tmp_path / "run", resume_from=checkpoint, allowed=("data",))


def test_data_whose_loader_states_no_fingerprint_must_not_move() -> None:
    before, after = ({"data.name": "text", "data.path": path} for path in ("one", "two"))
    assert [one.moves_data for one in changes(before, after, **{FINGERPRINT: "1234"}).settings] == [True]
    with pytest.raises(UsageError, match=r"data.path: one -> two .*: the checkpoint holds no fingerprint of its data"):
        changes(before, after)


# A run of the command line.


@pytest.fixture
def mplug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command in a folder of its own, in this process."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(main, words)


def test_a_resumed_run_refuses_logs_and_records_its_changes(
    mplug: Callable[..., Result], tiny: list[str], text_file: Path
) -> None:
    run = Path("runs/one")
    assert mplug("train", *tiny, "--set", f"data.path={text_file}", "--name", "one").exit_code == 0
    more = ("train", "--resume", "--set", "trainer.steps=5")
    refused = mplug(*more, "--set", "optimizer.lr=1e-4")
    assert refused.exit_code == 2
    for words in ("optimizer.lr: 0.005 -> 0.0001 (--set)", "add --allow-change optimizer.lr"):
        assert words in refused.output, refused.output
    assert "lr: 0.005" in (run / "config.yaml").read_text()
    unfit = mplug(*more, "--optimizer", "sgd", "--allow-change", "optimizer")
    assert unfit.exit_code == 2
    for words in ("no optimizer state 'momentum_buffer'", "exp_avg, exp_avg_sq and step", "checkpoint.pretrained="):
        assert words in unfit.output, unfit.output
    again = mplug(*more, "--set", "optimizer.lr=1e-4", "--allow-change", "optimizer.lr")
    assert again.exit_code == 0, again.output
    assert "changed since the checkpoint: trainer.steps: 4 -> 5" in again.output
    assert "changed since the checkpoint: optimizer.lr: 0.005 -> 0.0001 (--allow-change)" in again.output
    assert "optimizer.lr: 0.005 -> 0.0001" in (run / "logs" / "rank0.log").read_text()
    kept = json.loads((run / "record.json").read_text())["changes"]
    assert {"step": 4, "field": "optimizer.lr", "old": 0.005, "new": 0.0001, "allowed_by_user": True} in kept
    assert read_manifest(run / "checkpoints" / "step_00000005")["changes"] == kept
    assert "optimizer.lr: 0.005 -> 0.0001, from step 5 on" in mplug("checkpoint", "show").output
    assert "changed" not in mplug("train", "--resume", "--set", "optimizer.lr=1e-4").output


def test_the_option_is_for_resuming(mplug: Callable[..., Result], tiny: list[str]) -> None:
    refused = mplug("train", *tiny, "--allow-change", "optimizer.lr")
    assert refused.exit_code == 2
    assert "--resume" in refused.output
