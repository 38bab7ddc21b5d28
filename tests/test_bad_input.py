"""What goes in wrong comes back as one message for the person at the keyboard: what, where, remedy."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from checkpoints import flip_bit
from command_line import Cli, assert_refused

from mplug.errors import UsageError
from mplug.run.prepare import check_data


@pytest.mark.parametrize(
    "words",
    [
        "--kernels triton --kernels mlp=quack",  # a supplier for all kinds and one for a kind are not one name twice
        "--kernels norm=triton --kernels mlp=triton",
        "--set parallel.tp.sequence_parallel=false",  # of an unused plugin that can read it
    ],
)
def test_what_only_looks_wrong_is_accepted(cli_here: Cli, words: str) -> None:
    result = cli_here("config", "show", *words.split())
    assert (result.returncode, result.stderr) == (0, "")


def test_all_problems_are_told_at_once_each_with_its_source_and_did_you_mean(cli: Cli, tmp_path: Path) -> None:
    lines = ("trainer:", "  stps: 100", "  seq_length: long", "model: {name: gpt,", "        num_layer: 3}")
    lines += ("schedule:", "  weight_decay:", "    nme: linear", "optimzer:", "  lr: 1.0")
    (tmp_path / "run.yaml").write_text("\n".join(lines))
    options = ("--set", "optimizer.lr=-1", "--data", "txt", "--set", "trainr.steps=3")
    result = cli("config", "show", "--config", "run.yaml", *options)
    assert_refused(result, [])
    problems = {line.strip().partition(": ")[0]: line for line in result.stderr.splitlines()[1:]}
    wanted = {
        "trainer.stps (run.yaml:2)": "did you mean 'steps'?",
        "trainer.seq_length (run.yaml:3)": "'long'",
        "model.num_layer (run.yaml:5)": "did you mean 'num_layers'?",
        "schedule.weight_decay.nme (run.yaml:8)": "did you mean 'name'?",
        "optimzer (run.yaml:9)": "did you mean 'optimizer'?",
        "optimizer.lr (--set)": "greater than 0",
        "data.name (--data)": "did you mean 'text'?",
        "trainr (--set)": "did you mean 'trainer'?",
    }
    assert set(problems) == set(wanted)
    assert [where for where, words in wanted.items() if words not in problems[where]] == []


@pytest.mark.parametrize("text", ["", "# nothing\n", "trainer:\n", "model:\n", "trainer: {}\n", "extensions:\n"])
def test_a_section_without_fields_changes_nothing(cli_here: Cli, tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    result = cli_here("config", "show", "--config", "run.yaml")
    assert result.returncode == 0, result.stderr
    assert yaml.safe_load(result.stdout) == yaml.safe_load(cli_here("config", "show").stdout)


def test_a_config_file_that_is_not_text_is_refused(cli_here: Cli, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"trainer:\n  steps: \xff\n")
    assert_refused(cli_here("config", "show", "--config", "run.yaml"), ["'run.yaml'", "utf-8"])


def test_a_file_system_that_refuses_is_a_sentence_and_a_wrong_answer_too() -> None:
    def run(check: Callable[..., object]) -> Any:
        return SimpleNamespace(config=None, hooks=SimpleNamespace(layered=lambda _: [("data/mine", check)]))

    def fails(config: object) -> None:
        raise PermissionError(13, "Permission denied", "corpus")

    with pytest.raises(UsageError, match=r"^data/mine cannot read 'corpus': Permission denied$"):
        check_data(run(fails))
    for answer in ("one sentence", 3, [3]):
        with pytest.raises(UsageError, match="the answer is a list of sentences or None"):
            check_data(run(lambda answer=answer, **_: answer))
    assert check_data(run(lambda **_: None)) == []
    assert check_data(run(lambda **_: ["one sentence"])) == ["one sentence"]


def test_data_is_checked_without_torch(new_interpreter_cli: Cli, tmp_path: Path) -> None:
    """What is wrong is told before torch is imported, which costs seconds."""
    (tmp_path / "path" / "torch").mkdir(parents=True)
    (tmp_path / "path" / "torch" / "__init__.py").write_text("raise ImportError('torch was imported')\n")
    result = new_interpreter_cli("train", "--set", "data.path=nowhere", path=tmp_path / "path")
    assert_refused(result, ["data.path 'nowhere' does not exist"])


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("model.vocab_size=100", ["model.vocab_size=100 is too small", "255", "model.vocab_size=256"]),
        ("trainer.device=cuda", ["trainer.device=cuda: torch finds no GPU", "trainer.device=auto or cpu"]),
    ],
)
def test_what_a_run_cannot_train_on_is_refused_before_the_first_step_and_leaves_the_runs_name_free(
    cli: Cli, tiny: list[str], text_file: Path, monkeypatch: pytest.MonkeyPatch, field: str, words: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = cli("train", *tiny, "--set", f"data.path={text_file}", "--set", field, "--name", "mine")
    assert_refused(result, words)
    assert "step 1/4" not in result.stdout
    assert not (text_file.parent / "runs" / "mine").exists()


# Runs.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test that needs a trained run leaves a copy of it for the others."""
    return tmp_path_factory.mktemp("saved") / "done"


@pytest.fixture
def trained(cli: Cli, tiny: list[str], text_file: Path, tmp_path: Path, saved: Path) -> Path:
    """runs/done: a run of four steps on text.txt, with checkpoints of steps 2 and 4."""
    run = tmp_path / "runs" / "done"
    if saved.exists():
        shutil.copytree(saved, run)
    else:
        options = ("--set", f"data.path={text_file.name}", "--set", "checkpoint.every=2", "--name", "done")
        result = cli("train", *tiny, *options)
        assert result.returncode == 0, result.stderr
        shutil.copytree(run, saved)
    return run


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, but logs."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".log"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_run_whose_steps_are_done_is_neither_continued_nor_overwritten(cli: Cli, trained: Path) -> None:
    before = contents(trained)
    result = cli("train", "--resume", "--name", "done")
    assert result.returncode == 0, result.stderr
    assert "nothing is left to do: all 4 steps of run 'done' are done" in result.stdout
    assert contents(trained) == before
    fewer = cli("train", "--resume", "--name", "done", "--set", "trainer.steps=3")
    assert_refused(fewer, ["is at step 4, and trainer.steps=3"])
    named = cli("train", "--name", "done", "--data", "mock")
    assert_refused(named, ["'runs/done' already exists", "--resume", "another --name"])
    assert contents(trained) == before


@pytest.mark.parametrize("name", ["../up", "nested/name", "."])
def test_a_name_that_is_not_a_folder_in_runs_is_refused(
    cli: Cli, tiny: list[str], text_file: Path, tmp_path: Path, name: str
) -> None:
    result = cli("train", *tiny, "--set", f"data.path={text_file}", "--name", name)
    assert_refused(result, [f"'{name}'", "--name"])
    assert {path.name for path in tmp_path.iterdir()} <= {text_file.name, "runs"}


@pytest.mark.parametrize("command", [("train", "--resume"), ("generate",)], ids=" ".join)
def test_an_unknown_run_and_one_without_a_checkpoint_are_refused(
    cli: Cli, trained: Path, command: tuple[str, ...]
) -> None:
    assert_refused(cli(*command, "--name", "dune"), ["'dune'", "done"])
    shutil.rmtree(trained / "checkpoints")
    assert_refused(cli(*command, "--name", "done"), ["no complete checkpoint", "runs/done", "--name"])


def test_a_runs_damaged_config_is_refused_with_its_line(cli: Cli, trained: Path) -> None:
    (trained / "config.yaml").write_text("model:\n  name: [gpt")
    assert_refused(cli("train", "--resume"), ["runs/done/config.yaml:2"])


def test_a_run_without_its_config_is_damaged_and_not_absent(cli_here: Cli, tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs" / "lost" / "checkpoints").mkdir(parents=True)
    for words in (
        ("train", "--resume", "--name", "lost"), ("train", "--resume"), ("generate", "--name", "lost"),
        ("checkpoint", "list", "--name", "lost"), ("train", *tiny, "--name", "lost"),
    ):  # fmt: skip
        assert_refused(cli_here(*words), ["the run 'runs/lost' has lost its file config.yaml; restore the file"])


# Checkpoints.


def halve_the_manifest(checkpoint: Path) -> None:
    """What a copy that broke off leaves."""
    path = checkpoint / "checkpoint.json"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_the_weights(checkpoint: Path) -> None:
    flip_bit(checkpoint / "rank00000.safetensors")


@pytest.mark.parametrize(("damage", "begins"), [(damage_the_weights, 4), (halve_the_manifest, 2)])
def test_a_run_continues_from_the_newest_valid_checkpoint_and_reports_the_one_that_it_skips(
    cli: Cli, trained: Path, damage: Callable[[Path], None], begins: int
) -> None:
    damage(trained / "checkpoints" / "step_00000004")
    result = cli("train", "--resume", "--set", "trainer.steps=6")
    assert result.returncode == 0, result.stderr
    assert f"6 steps, from step {begins}" in result.stdout, "before it starts, a run reads the manifests only"
    assert "mplug: skipped: checkpoint 'runs/done/checkpoints/step_00000004' is damaged" in result.stderr
    assert "mplug: continuing from step 2" in result.stderr
    steps = [json.loads(line)["step"] for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_sample_is_of_the_newest_valid_checkpoint_and_reports_the_one_that_it_skips(cli: Cli, trained: Path) -> None:
    damage_the_weights(trained / "checkpoints" / "step_00000004")
    result = cli("generate", "--tokens", "1", "--prompt", "ab")
    assert result.returncode == 0, result.stderr
    assert "mplug: skipped: checkpoint 'runs/done/checkpoints/step_00000004' is damaged" in result.stderr
    assert "mplug: reading step 2" in result.stderr
    assert result.stdout.startswith("ab")


# Samples.


@pytest.mark.usefixtures("trained")
def test_a_step_without_a_checkpoint_and_an_empty_prompt_are_refused(cli: Cli) -> None:
    assert_refused(cli("generate", "--step", "3"), ["runs/done", "step 3", "available steps: 2 and 4"])
    assert_refused(cli("generate", "--prompt", ""), ["--prompt", "empty"])


def test_a_run_with_cuda_graphs_is_sampled_and_not_resumed_on_a_cpu(cli: Cli, trained: Path) -> None:
    config = trained / "config.yaml"
    assert "graphs: false" in config.read_text()
    config.write_text(config.read_text().replace("graphs: false", "graphs: true"))
    sampled = cli("generate", "--tokens", "1", "--prompt", "ab")
    assert sampled.returncode == 0, sampled.stderr
    resumed = cli("train", "--resume", "--set", "trainer.steps=6")
    assert_refused(resumed, ["trainer.graphs=true", "the run is on the CPU", "set trainer.graphs=false"])


def test_data_without_a_tokenizer_gives_no_text(cli: Cli, tiny: list[str]) -> None:
    result = cli("train", *tiny, "--data", "mock", "--name", "noise")
    assert result.returncode == 0, result.stderr
    assert_refused(cli("generate"), ["runs/noise", "no tokenizer"])


# A full disk.


def test_a_disk_that_is_full_before_any_checkpoint_ends_the_run_in_one_sentence(
    cli: Cli, tiny: list[str], text_file: Path, small_disk: Path
) -> None:
    state = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(state.f_bavail * state.f_frsize - 20 * 1024))
    options = ("--set", f"data.path={text_file}", "--set", "trainer.steps=100", "--name", "full")  # metrics: 25 kB
    result = cli("train", *tiny, *options, cwd=small_disk)
    assert result.returncode == 1, result.stdout + result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.startswith("mplug: ")
    assert "space left" in result.stderr
