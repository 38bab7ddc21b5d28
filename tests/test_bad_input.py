"""What goes in wrong comes back as one message for the person at the keyboard: what, where, remedy."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from mplug.checkpoint.folder import read_valid
from mplug.errors import UsageError
from mplug.run.prepare import check_data

Cli = Callable[..., subprocess.CompletedProcess[str]]


def assert_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """The user's input is wrong: exit status 2 and a message with these words, without a traceback."""
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("mplug:")
    assert [word for word in words if word not in result.stderr] == [], result.stderr


def refuse_file(cli: Cli, folder: Path, text: str, *words: str) -> None:
    """A config file with this text is refused with these words."""
    (folder / "run.yaml").write_text(text)
    assert_refused(cli("config", "show", "--config", "run.yaml"), *words)


# Names.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model", "gtp"), ("model.name (--model)", "'gtp'", "did you mean 'gpt'?", "installed: ")),
        (("--model", "xyzzy"), ("model.name (--model)", "'xyzzy'", "installed: ", "gpt")),
        (("--optimizer", "adamv"), ("optimizer.name (--optimizer)", "'adamv'", "did you mean 'adamw'?", "installed: ")),
        (("--data", "txt"), ("data.name (--data)", "'txt'", "did you mean 'text'?", "installed: ", "mock")),
        (("--attention", "spda"), ("kernels.attention (--attention)", "'spda'", "did you mean 'sdpa'?", "reference")),
        (("--kernels", "referense"), ("kernels.default (--kernels)", "did you mean 'reference'?", "sdpa")),
        (("--kernels", "norm=referense"), ("kernels.norm (--kernels)", "did you mean 'reference'?", "sdpa")),
        (("--kernels", "nrm=reference"), ("kernels.nrm (--kernels)", "did you mean 'norm'?")),
        (("--set", "extensions.xyzzy={}"), ("extensions.xyzzy (--set)", "'xyzzy'", "installed: ")),
        (("--set", "parallel.xyzzy.stage=1"), ("parallel.xyzzy (--set)", "installed plugins: ", "install the package")),
        (("--set", "parallel.data=xyzzy"), ("parallel.data (--set)", "'xyzzy'", "installed: ")),
        (("--parallel", "xyzzy2"), ("parallel.layout (--parallel)", "unknown strategy 'xyzzy'", "; use one of them")),
        (("--parallel", "8"), ("parallel.layout (--parallel)", "'8'", "strategy's name", "tp4pp2")),
        (("--set", "model.name="), ("model.name (--set)", "is required", "the name of a plugin", "gpt")),
    ],
    ids=" ".join,
)
def test_an_unknown_name_is_refused_with_did_you_mean_and_what_is_installed(
    cli_here: Cli, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert_refused(cli_here("config", "show", *options), *words)


@pytest.mark.parametrize("preset", ["naon", "[nano]", "125"])
def test_a_preset_that_the_model_does_not_have_is_refused_with_those_that_it_has(cli_here: Cli, preset: str) -> None:
    result = cli_here("config", "show", "--set", f"model.preset={preset}")
    assert_refused(result, "model.preset (--set)", "'gpt' has no preset", "nano", "125m", "175b")


# Fields.


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("trainer.stps=3", ("unknown field", "did you mean 'steps'?")),
        ("model.num_layer=3", ("unknown field", "did you mean 'num_layers'?")),
        ("optimizer.learning_rate=3", ("unknown field", "lr", "weight_decay")),
        ("data.pth=a.txt", ("unknown field", "did you mean 'path'?")),
        ("schedule.weight_decay.nme=linear", ("unknown field", "did you mean 'name'?")),
        ("kernels.atention=sdpa", ("did you mean 'attention'?",)),
        ("kernels.sdpa.fast=true", ("unknown field",)),
        ("trainer.steps=many", ("integer", "'many'")),
        ("trainer.steps=1.5", ("integer", "1.5")),
        ("trainer.steps=0", ("greater than 0", "not 0")),
        ("trainer.steps=yes", ("integer",)),
        ("trainer.steps.x=3", ("integer",)),
        ("trainer.seed=-1", ("greater than or equal to 0", "-1")),
        ("trainer.device=tpu", ("'auto', 'cpu' or 'cuda'", "'tpu'")),
        ("trainer.precision=fp7", ("bf16, fp16, fp32, fp64, fp8 and te-fp8", "did you mean 'fp8'")),
        ("trainer.precision=bf61", ("did you mean 'bf16'?", "'bf61'")),
        ("trainer.precision=16", ("string", "16")),
        ("optimizer.lr=fast", ("number", "'fast'")),
        ("optimizer.lr=2026-13-45", ("number", "'2026-13-45'")),
        ("model.qk_norm=perhaps", ("boolean", "'perhaps'")),
        ("schedule.name=cosin", ("'cosine'", "'cosin'")),
        ("schedule.weight_decay=3", ("not 3",)),
        ("checkpoint.keep=0", ("greater than 0",)),
        ("kernels.sdpa=3", ("not 3",)),
        # of plugins that the run does not use
        ("kernels.flash.fast=true", ("unknown field",)),
        ("adapters.lora.targets=[]", ("must have at least 1 entry, not []",)),
        ("parallel.tp.sequence=maybe", ("unknown field", "did you mean 'sequence_parallel'?")),
        ("parallel.tp.sequence_parallel=perhaps", ("boolean", "'perhaps'")),
        ("parallel.tp=2", ("not 2", "--parallel tp2")),
        ("parallel.tp=0", ("not 0",)),
    ],
)
def test_a_misspelt_or_mistyped_field_is_refused_with_its_path_and_source(
    cli_here: Cli, assignment: str, words: tuple[str, ...]
) -> None:
    field = assignment.partition("=")[0].removesuffix(".x")
    assert_refused(cli_here("config", "show", "--set", assignment), f"{field} (--set): ", *words)


def test_a_list_of_wrong_entries_is_not_also_too_short(cli_here: Cli) -> None:
    result = cli_here("config", "show", "--set", "adapters.lora.targets=[1, '']")
    assert_refused(result, "adapters.lora.targets.0 (--set): must be a valid string", "targets.1 (--set): must have")
    assert "targets (--set)" not in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--adapt lora --adapt lora", "--adapt lora is given twice"),
        (
            "--adapt lora --set adapters.mplug-lora/lora.rank=2",
            "adapters.mplug-lora/lora (--set): is the plugin 'lora', which the config also names",
        ),
        ("--kernels triton --kernels sdpa", "--kernels NAME is given twice"),
        ("--kernels norm=triton --kernels norm=quack", "--kernels norm=NAME is given twice"),
        ("--attention sdpa --kernels attention=flash", "--attention (--kernels attention=NAME) is given twice"),
        ("--parallel tp2pp2tp2", "layout 'tp2pp2tp2' names 'tp' twice"),
        ("--set adapters.lora.targets=[q,v,q]", "adapters.lora.targets (--set): must have each name once, but has 'q'"),
        ("--set model.frozen=[a,a]", "model.frozen (--set): must have each name once, but has 'a' twice"),
        ("--set trainer.base_modules=[a,a]", "trainer.base_modules (--set): must have each name once"),
        (
            "--set checkpoint.pretrained.path=x --set checkpoint.pretrained.except=[a,a]",
            "checkpoint.pretrained.except (--set): must have each name once",
        ),
        ("--set memory.recompute.slots=[attention,attention]", "memory.recompute.slots (--set): must have each name"),
        ("--optimizer muon --set optimizer.tables=[vocab,vocab]", "optimizer.tables (--set): must have each name once"),
    ],
)
def test_a_name_that_is_given_twice_is_refused(cli_here: Cli, words: str, said: str) -> None:
    assert_refused(cli_here("config", "show", *words.split()), said)


@pytest.mark.parametrize(
    "words", ["--kernels triton --kernels mlp=quack", "--kernels norm=triton --kernels mlp=triton"]
)
def test_a_supplier_for_all_kinds_and_one_for_a_kind_are_not_one_name_twice(cli_here: Cli, words: str) -> None:
    assert cli_here("config", "show", *words.split()).returncode == 0


@pytest.mark.parametrize(("layout", "end"), [("pp2", "to set the degree, use --parallel pp2tp2"), ("tp4", "not 2")])
def test_a_degree_in_the_place_of_a_section_is_refused_beside_a_layout(cli_here: Cli, layout: str, end: str) -> None:
    result = cli_here("config", "show", "--parallel", layout, "--set", "parallel.tp=2")
    assert_refused(result, "parallel.tp (--set): ")
    assert result.stderr.rstrip().endswith(end)


def test_what_an_unused_plugin_can_read_is_accepted(cli_here: Cli) -> None:
    result = cli_here("config", "show", "--set", "parallel.tp.sequence_parallel=false")
    assert (result.returncode, result.stderr) == (0, "")


def test_all_problems_are_told_at_once_each_with_its_source_and_did_you_mean(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        """\
trainer:
  stps: 100
  seq_length: long
model: {name: gpt,
        num_layer: 3}
schedule:
  weight_decay:
    nme: linear
optimzer:
  lr: 1.0
"""
    )
    options = ("--set", "optimizer.lr=-1", "--data", "txt", "--set", "trainr.steps=3")
    result = cli("config", "show", "--config", "run.yaml", *options)
    assert_refused(result)
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


def test_a_problem_of_several_fields_is_told_with_the_source_of_those_fields(cli_here: Cli) -> None:
    result = cli_here("config", "show", "--set", "model.num_attention_heads=3", "--set", "model.hidden_size=32")
    assert_refused(result, "num_attention_heads=3", "hidden_size=32", "(--set)")
    assert "default.yaml" not in result.stderr


def test_a_global_batch_that_is_no_multiple_of_the_micro_batch_is_refused(cli_here: Cli) -> None:
    result = cli_here("config", "show", "--set", "trainer.micro_batch_size=3", "--set", "trainer.global_batch_size=8")
    assert_refused(result, "trainer.global_batch_size (--set)", "3", "8", "multiple of trainer.micro_batch_size")


def test_learned_positions_shorter_than_the_sequence_are_refused(cli: Cli, tiny: list[str]) -> None:
    learned = ("model.position=learned", "model.max_position_embeddings=16", "trainer.seq_length=17")
    result = cli("train", *tiny, *(word for field in learned for word in ("--set", field)))
    assert_refused(result, "trainer.seq_length=17", "model.max_position_embeddings=16")


@pytest.mark.parametrize(
    "assignment", ["trainer.steps", "trainer=3", "=3", "trainer.=3", ".steps=3", "trainer..steps=3", ""]
)
def test_an_assignment_without_section_field_or_value_is_refused(cli_here: Cli, assignment: str) -> None:
    result = cli_here("config", "show", "--set", assignment)
    assert_refused(result, f"--set '{assignment}'", "section.field=value", "trainer.steps=100")


# Config files.


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainer: [1, 2", ("run.yaml:1", "YAML")),
        ("trainer:\n\tsteps: 3\n", ("run.yaml:2", "YAML")),
        ("trainer: {steps: 3}\n---\nmodel: {}\n", ("run.yaml:2", "YAML")),
        ("trainer:\n  steps: !!python/object:os.system x\n", ("run.yaml:2",)),
        ("optimizer:\n  lr: 2026-13-45\n", ("run.yaml:2", "2026-13-45")),
        ("trainer: &same\n  steps: *same\n", ("run.yaml:2",)),
        ("trainer:\n  steps: 3\n  steps: 4\n", ("run.yaml:3", "'trainer.steps'", "twice")),
        ("trainer:\n  steps: 3\nmodel:\n  name: gpt\ntrainer:\n  seed: 4\n", ("run.yaml:5", "'trainer'", "twice")),
        ("- trainer\n- model\n", ("run.yaml", "mapping of sections")),
        ("gpt\n", ("run.yaml", "mapping of sections")),
        ("trainr:\n  steps: 3\n", ("trainr (run.yaml:1)", "did you mean 'trainer'?", "checkpoint")),
    ],
    ids=[
        "unclosed",
        "tab",
        "two documents",
        "tag",
        "no such date",
        "inside itself",
        "field twice",
        "section twice",
        "list",
        "word",
        "unknown section",
    ],
)
def test_a_config_file_that_cannot_be_read_is_refused_with_its_line(
    cli_here: Cli, tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    refuse_file(cli_here, tmp_path, text, *words)


@pytest.mark.parametrize("text", ["trainer: 3\n", "model: gpt\n", "extensions: [watch]\n", "kernels: sdpa\n"])
def test_a_value_in_place_of_a_section_is_one_problem(cli_here: Cli, tmp_path: Path, text: str) -> None:
    refuse_file(cli_here, tmp_path, text, f"mplug: {text.partition(':')[0]} (run.yaml:1): must be a section")


@pytest.mark.parametrize("text", ["", "# nothing\n", "trainer:\n", "model:\n", "trainer: {}\n", "extensions:\n"])
def test_a_section_without_fields_changes_nothing(cli_here: Cli, tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    result = cli_here("config", "show", "--config", "run.yaml")
    assert result.returncode == 0, result.stderr
    assert yaml.safe_load(result.stdout) == yaml.safe_load(cli_here("config", "show").stdout)


def test_a_config_file_that_is_not_there_is_refused(cli_here: Cli) -> None:
    assert_refused(cli_here("config", "show", "--config", "nowhere.yaml"), "'nowhere.yaml'", "No such file")


def test_a_folder_in_place_of_a_config_file_is_refused(cli_here: Cli) -> None:
    assert_refused(cli_here("config", "show", "--config", "."), "'.'", "directory")


def test_a_config_file_that_is_not_text_is_refused(cli_here: Cli, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"trainer:\n  steps: \xff\n")
    assert_refused(cli_here("config", "show", "--config", "run.yaml"), "'run.yaml'", "utf-8")


# Commands.


def test_an_unknown_command_gets_did_you_mean(cli: Cli) -> None:
    assert_refused(cli("trian"), "'trian'", "did you mean 'train'?")


def test_an_unknown_option_gets_did_you_mean(cli: Cli) -> None:
    result = cli("train", "--modle", "gpt")
    assert result.returncode == 2
    assert all(words in result.stderr for words in ("'--modle'", "Did you mean", "'--model'"))


@pytest.mark.parametrize("command", ["show", "check"])
def test_an_unknown_plugin_is_not_shown_and_not_found_sound(cli_here: Cli, command: str) -> None:
    assert_refused(cli_here("plugins", command, "gtp"), "'gtp'", "did you mean 'gpt'?")


# What is wrong is told before torch is imported, which costs seconds.


@pytest.fixture
def no_torch(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH in which torch cannot be imported."""
    (tmp_path / "path" / "torch").mkdir(parents=True)
    (tmp_path / "path" / "torch" / "__init__.py").write_text("raise ImportError('torch was imported')\n")
    return tmp_path / "path"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        (["trainer.stps=3"], "trainer.stps (--set)"),
        (["model.name=gtp"], "did you mean 'gpt'?"),
        (["model.position=learned", "trainer.seq_length=257"], "model.max_position_embeddings=256"),
    ],
    ids=["misspelt field", "unknown plugin", "refused by the model"],
)
def test_a_config_is_refused_without_torch(
    new_interpreter_cli: Cli, no_torch: Path, fields: list[str], word: str
) -> None:
    result = new_interpreter_cli("train", *(word for field in fields for word in ("--set", field)), path=no_torch)
    assert_refused(result, word)


@pytest.mark.parametrize("command", ["--help", "train --help", "plugins list", "config show", "config schema"])
def test_what_only_tells_runs_without_torch(new_interpreter_cli: Cli, no_torch: Path, command: str) -> None:
    result = new_interpreter_cli(*command.split(), path=no_torch)
    assert result.returncode == 0, result.stderr


# Data, model, device.


@pytest.fixture
def texts(tmp_path: Path, text_file: Path) -> None:
    """Files and folders without text, beside text.txt, which has some."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing.txt").touch()
    (tmp_path / "one.txt").write_text("x")
    (tmp_path / "cut.idx").write_bytes(b"MMIDIDX\0\0\1")
    (tmp_path / "cut.bin").touch()


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (["data.path=nowhere.txt"], ("data.path 'nowhere.txt'",)),
        (["data.path=empty"], ("data.path 'empty'", "no file")),
        (["data.path=nothing.txt"], ("data.path 'nothing.txt'", "the train split has no text")),
        (["data.path=one.txt"], ("data.path 'one.txt'", "the train split has no text")),
        (["data.name=indexed", "data.path=nowhere"], ("'nowhere.idx' does not exist",)),
        (["data.name=indexed", "data.path=cut"], ("'cut.idx' has 10 bytes, fewer than its header needs",)),
        (["data.name=packed", "data.path=nowhere.jsonl"], ("data.path 'nowhere.jsonl' does not exist",)),
        (["data.name=packed", "data.path=text.txt"], ("text.txt:1 is not valid JSON",)),
        (["data.name=energon", "data.path=nowhere"], ("data.path 'nowhere' does not exist",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_data_that_a_run_cannot_read_is_refused_before_the_run_is_announced(
    cli: Cli, tiny: list[str], tmp_path: Path, fields: list[str], words: tuple[str, ...]
) -> None:
    before = sorted(tmp_path.iterdir())
    result = cli("train", *tiny, *(word for field in fields for word in ("--set", field)), "--name", "mine")
    assert_refused(result, *words)
    assert result.stdout == ""
    assert sorted(tmp_path.iterdir()) == before


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


def test_data_is_checked_without_torch(new_interpreter_cli: Cli, no_torch: Path) -> None:
    result = new_interpreter_cli("train", "--set", "data.path=nowhere", path=no_torch)
    assert_refused(result, "data.path 'nowhere' does not exist")


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            ["data.path=text.txt", "model.vocab_size=100"],
            ("model.vocab_size=100 is too small", "255", "model.vocab_size=256"),
        ),
        (
            ["data.path=text.txt", "trainer.device=cuda"],
            ("trainer.device=cuda: torch finds no GPU", "trainer.device=auto or cpu"),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_a_run_cannot_train_on_is_refused_before_the_first_step_and_leaves_the_runs_name_free(
    cli: Cli,
    tiny: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fields: list[str],
    words: tuple[str, ...],
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = cli("train", *tiny, *(word for field in fields for word in ("--set", field)), "--name", "mine")
    assert_refused(result, *words)
    assert "step 1/4" not in result.stdout
    assert not (tmp_path / "runs" / "mine").exists()


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


def test_resuming_a_run_whose_steps_are_done_says_so_and_changes_nothing(cli: Cli, trained: Path) -> None:
    before = contents(trained)
    result = cli("train", "--resume", "--name", "done")
    assert result.returncode == 0, result.stderr
    assert "nothing is left to do: all 4 steps of run 'done' are done" in result.stdout
    assert contents(trained) == before
    assert_refused(
        cli("train", "--resume", "--name", "done", "--set", "trainer.steps=3"), "is at step 4, and trainer.steps=3"
    )


def test_the_name_of_an_existing_run_is_refused_and_that_run_is_left_alone(
    cli: Cli, tiny: list[str], trained: Path
) -> None:
    before = contents(trained)
    assert_refused(cli("train", *tiny, "--name", "done"), "'runs/done' already exists", "--resume", "another --name")
    assert contents(trained) == before


@pytest.mark.parametrize("name", ["../up", "nested/name", "."])
def test_a_name_that_is_not_a_folder_in_runs_is_refused(
    cli: Cli, tiny: list[str], text_file: Path, tmp_path: Path, name: str
) -> None:
    result = cli("train", *tiny, "--set", f"data.path={text_file}", "--name", name)
    assert_refused(result, f"'{name}'", "--name")
    assert {path.name for path in tmp_path.iterdir()} <= {text_file.name, "runs"}


@pytest.mark.parametrize("command", [("train", "--resume"), ("generate",)], ids=" ".join)
def test_without_any_run_there_is_nothing_to_continue_or_sample(cli: Cli, command: tuple[str, ...]) -> None:
    assert_refused(cli(*command), "no run in 'runs'", "mplug train")


@pytest.mark.parametrize("command", [("train", "--resume"), ("generate",)], ids=" ".join)
def test_an_unknown_run_is_refused_with_those_that_exist(cli: Cli, trained: Path, command: tuple[str, ...]) -> None:
    assert_refused(cli(*command, "--name", "dune"), "'dune'", "done")


@pytest.mark.parametrize("command", [("train", "--resume"), ("generate",)], ids=" ".join)
def test_a_run_without_a_checkpoint_is_refused_with_a_remedy(cli: Cli, trained: Path, command: tuple[str, ...]) -> None:
    shutil.rmtree(trained / "checkpoints")
    assert_refused(cli(*command, "--name", "done"), "no complete checkpoint", "runs/done", "--name")


def test_a_runs_damaged_config_is_refused_with_its_line(cli: Cli, trained: Path) -> None:
    (trained / "config.yaml").write_text("model:\n  name: [gpt")
    assert_refused(cli("train", "--resume"), "runs/done/config.yaml:2")


# Checkpoints.


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the bytes of a file."""
    path.write_bytes(change(path.read_bytes()))


def flip_the_middle(data: bytes) -> bytes:
    """The same bytes but one bit."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def first_half(data: bytes) -> bytes:
    """What a copy that broke off leaves."""
    return data[: len(data) // 2]


def without_the_loader(data: bytes) -> bytes:
    """A manifest that lacks an entry."""
    return json.dumps({key: value for key, value in json.loads(data).items() if key != "loader"}).encode()


def flip_in(path: Path, kind: str) -> None:
    """Flip a bit in the first tensor of a kind ('weight', 'exp_avg') of a safetensors file."""
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    tensors = json.loads(data[8:header])
    low, high = next(entry["data_offsets"] for name, entry in tensors.items() if f"/{kind}@" in name)
    start, end = header + low, header + high
    path.write_bytes(data[:start] + flip_the_middle(data[start:end]) + data[end:])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated weights": lambda folder: rewrite(folder / "rank00000.safetensors", first_half),
    "a flipped bit in the weights": lambda folder: flip_in(folder / "rank00000.safetensors", "weight"),
    "a flipped bit in the optimizer state": lambda folder: flip_in(folder / "rank00000.safetensors", "exp_avg"),
    "no weights": lambda folder: (folder / "rank00000.safetensors").unlink(),
    "no manifest": lambda folder: (folder / "checkpoint.json").unlink(),
    "half a manifest": lambda folder: rewrite(folder / "checkpoint.json", first_half),
    "an incomplete manifest": lambda folder: rewrite(folder / "checkpoint.json", without_the_loader),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_damage_is_found(trained: Path, damage: str) -> None:
    path = trained / "checkpoints" / "step_00000004"
    assert read_valid(path)["step"] == 4
    DAMAGES[damage](path)
    with pytest.raises(UsageError, match=r"runs/done/checkpoints/step_00000004' is damaged: .*; remove it to use the"):
        read_valid(path)


@pytest.mark.parametrize(("damage", "begins"), [("a flipped bit in the optimizer state", 4), ("half a manifest", 2)])
def test_a_run_continues_from_the_newest_valid_checkpoint_and_reports_the_one_that_it_skips(
    cli: Cli, trained: Path, damage: str, begins: int
) -> None:
    DAMAGES[damage](trained / "checkpoints" / "step_00000004")
    result = cli("train", "--resume", "--set", "trainer.steps=6")
    assert result.returncode == 0, result.stderr
    assert f"6 steps, from step {begins}" in result.stdout, "before it starts, a run reads the manifests only"
    assert "mplug: skipped: checkpoint 'runs/done/checkpoints/step_00000004' is damaged" in result.stderr
    assert "mplug: continuing from step 2" in result.stderr
    steps = [json.loads(line)["step"] for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_run_without_a_valid_checkpoint_is_refused_with_all_of_them(cli: Cli, trained: Path) -> None:
    for path in (trained / "checkpoints").iterdir():
        DAMAGES["no manifest"](path)
    before = contents(trained)
    assert_refused(cli("train", "--resume"), "no checkpoint in", "step_00000002", "step_00000004", "start a new run")
    assert contents(trained) == before


def test_a_sample_is_of_the_newest_valid_checkpoint_and_reports_the_one_that_it_skips(cli: Cli, trained: Path) -> None:
    DAMAGES["a flipped bit in the weights"](trained / "checkpoints" / "step_00000004")
    result = cli("generate", "--tokens", "1", "--prompt", "ab")
    assert result.returncode == 0, result.stderr
    assert "mplug: skipped: checkpoint 'runs/done/checkpoints/step_00000004' is damaged" in result.stderr
    assert "mplug: sampling from step 2" in result.stderr
    assert result.stdout.startswith("ab")


def test_without_the_damaged_checkpoint_the_one_before_it_is_used(cli: Cli, trained: Path) -> None:
    undisturbed = (trained / "metrics.jsonl").read_text().splitlines()
    shutil.rmtree(trained / "checkpoints" / "step_00000004")
    result = cli("train", "--resume")
    assert result.returncode == 0, result.stderr
    repeated = (trained / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in repeated] == [1, 2, 3, 4]
    assert [json.loads(line)["loss"] for line in repeated] == [json.loads(line)["loss"] for line in undisturbed]


@pytest.mark.parametrize("field", ["model.hidden_size=64", "model.num_layers=3", "model.num_layers=1"])
def test_a_run_does_not_resume_with_a_model_of_another_shape(cli: Cli, trained: Path, field: str) -> None:
    before = contents(trained)
    result = cli("train", "--resume", "--set", "trainer.steps=6", "--set", field)
    assert_refused(result, "runs/done/checkpoints/step_00000004")
    assert contents(trained) == before


# Samples.


def test_a_step_without_a_checkpoint_is_refused(cli: Cli, trained: Path) -> None:
    assert_refused(cli("generate", "--step", "3"), "runs/done", "step 3", "available steps: 2 and 4")


def test_an_empty_prompt_is_refused(cli: Cli, trained: Path) -> None:
    assert_refused(cli("generate", "--prompt", ""), "--prompt", "empty")


def test_a_run_with_cuda_graphs_is_sampled_and_not_resumed_on_a_cpu(cli: Cli, trained: Path) -> None:
    config = trained / "config.yaml"
    assert "graphs: false" in config.read_text()
    config.write_text(config.read_text().replace("graphs: false", "graphs: true"))
    sampled = cli("generate", "--tokens", "1", "--prompt", "ab")
    assert sampled.returncode == 0, sampled.stderr
    resumed = cli("train", "--resume", "--set", "trainer.steps=6")
    assert_refused(resumed, "trainer.graphs=true", "the run is on the CPU", "set trainer.graphs=false")


def test_data_without_a_tokenizer_gives_no_text(cli: Cli, tiny: list[str]) -> None:
    result = cli("train", *tiny, "--data", "mock", "--name", "noise")
    assert result.returncode == 0, result.stderr
    assert_refused(cli("generate"), "runs/noise", "no tokenizer")


# A full disk.


def assert_failed_in_one_sentence(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """The world failed: exit status 1 and one line with these words."""
    assert result.returncode == 1, result.stdout + result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.startswith("mplug: ")
    assert [word for word in words if word not in result.stderr] == [], result.stderr


def test_a_disk_that_is_full_at_the_second_checkpoint_leaves_the_first_as_it_was(
    cli: Cli, tiny: list[str], text_file: Path, small_disk: Path
) -> None:
    saving = ("checkpoint.every=1", "checkpoint.keep=9", "model.hidden_size=40")  # 0.7 MB a checkpoint
    fields = (*saving, f"data.path={text_file}")
    options = [word for field in fields for word in ("--set", field)]
    result = cli("train", *tiny, *options, "--name", "full", cwd=small_disk)
    assert_failed_in_one_sentence(result, "step_00000002", "no space left", "step_00000001", "intact")
    checkpoints = small_disk / "runs" / "full" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step_00000001"]
    sample = cli("generate", "--tokens", "1", "--prompt", "2 times", cwd=small_disk)
    assert sample.returncode == 0, sample.stderr
    assert sample.stdout.startswith("2 times")


def test_a_disk_that_is_full_before_any_checkpoint_ends_the_run_in_one_sentence(
    cli: Cli, tiny: list[str], text_file: Path, small_disk: Path
) -> None:
    state = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(state.f_bavail * state.f_frsize - 20 * 1024))
    options = ("--set", f"data.path={text_file}", "--set", "trainer.steps=100", "--name", "full")  # metrics: 25 kB
    assert_failed_in_one_sentence(cli("train", *tiny, *options, cwd=small_disk), "space left")


@pytest.mark.parametrize(
    ("words", "remedies"),
    [
        (["--lr", "1e-3"], ["'--lr'", "instead: --set optimizer.lr=1e-3\n"]),
        (
            ["--steps=10", "--batch-size", "8", "--optimizer", "sgd", "--epochs"],
            [
                "'--steps'; set the field of the config instead: --set trainer.steps=10\n",
                "instead: --set trainer.global_batch_size=8 or --set trainer.micro_batch_size=8\n",
                "'--epochs'; 'mplug config show' prints the fields",
            ],
        ),
        (["--stpes", "10"], ["--set trainer.steps=10\n"]),
        (["--hidden-size", "64"], ["--set model.hidden_size=64\n"]),
        (["--set", "steps=10"], ["--set 'steps=10'", "'steps' lacks the section", "use --set trainer.steps=10\n"]),
        (["--set", "trainer.steps", "10"], ["'trainer.steps' is not an assignment; use --set trainer.steps=10\n"]),
        (["."], ["to train on the file or folder '.', use --set data.path=.\n"]),
        (["--data", "book.txt"], ["no plugin 'book.txt'", "--set data.path=book.txt"]),
    ],
    ids=["lr", "three options", "typo", "field of a plugin", "no section", "space", "path", "data"],
)
def test_a_word_that_is_a_field_points_to_it(cli: Cli, words: list[str], remedies: list[str]) -> None:
    assert_refused(cli("train", *words), *remedies)


def test_a_misspelled_option_points_to_the_option_rather_than_to_a_field(cli: Cli) -> None:
    refused = cli("train", "--optimiser", "sgd")
    assert refused.returncode == 2
    assert "--optimizer" in refused.stderr
    assert "--set" not in refused.stderr
