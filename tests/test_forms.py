"""The forms of settings that people try: short options, assignments without --set, a config file, '~' in paths."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from click.testing import CliRunner
from command_line import Cli

from mplug.cli import main
from mplug.cli.groups import OpenGroup
from mplug.cli.options import FLAGS
from mplug.config.sources import read_assignments, with_home
from mplug_hints.options import NEAR_MISSES


def shown(cli_here: Cli, *words: str) -> dict:
    result = cli_here("config", "show", *words)
    assert (result.returncode, result.stderr) == (0, "")
    return yaml.safe_load(result.stdout)


def test_short_options_assignments_and_a_config_file_set_what_set_does(cli_here: Cli, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("trainer: {steps: 7, eval_every: 3}\ndata: {name: packed}\n")
    (tmp_path / "chats.jsonl").write_text("")
    short = ("--lr", "1e-3", "--steps=5", "--batch-size", "4", "--seq-length", "32", "--seed", "9")
    long = ("optimizer.lr=1e-3", "trainer.steps=5", "trainer.global_batch_size=4", "trainer.seq_length=32")
    words = [word for one in (*long, "trainer.seed=9", "data.path=chats.jsonl") for word in ("--set", one)]
    expected = shown(cli_here, "--config", "run.yaml", *words)
    assert expected["trainer"]["eval_every"] == 3
    assert shown(cli_here, "run.yaml", *short, "--data", "chats.jsonl") == expected
    assert shown(cli_here, "run.yaml", *long, "trainer.seed=9", "data.path=chats.jsonl") == expected
    without_file = [*short, "--data", "packed", "--data", "chats.jsonl", "trainer.eval_every=3"]
    assert shown(cli_here, *without_file) == expected


def test_a_tilde_is_the_users_home_in_every_source(
    cli_here: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "run.yaml").write_text("data: {path: ~/book.txt}\n")
    home = f"{tmp_path}/home/book.txt"
    for words in (
        ["--config=~/run.yaml"], ["~/run.yaml"], ["--set", "data.path=~/book.txt"], ["data.path=~/book.txt"],
        ["--data", "~/book.txt"],
    ):  # fmt: skip
        assert shown(cli_here, *words)["data"]["path"] == home, words
    assert with_home(["~/a", "~", "a~/b", "~ /x", 3]) == [f"{tmp_path}/home/a", "~", "a~/b", "~ /x", 3]
    blend = read_assignments(["data.path={~/a: 0.5, b: 0.5}"])
    assert {key[-1] for key in blend} == {f"{tmp_path}/home/a", "b"}


def test_the_help_of_train_shows_the_values_of_the_default_run() -> None:
    text = " ".join(CliRunner().invoke(main, ["train", "--help"], terminal_width=200).output.split())
    for words in (
        "(an installed plugin). [default: gpt]", "[default: 950]", "[default: 0.005]", "[default: fp32]",
        "[default: flash, triton, sdpa]", "[default: 8]",
    ):  # fmt: skip
        assert words in text


def test_near_misses_name_fields_that_exist_and_no_word_twice() -> None:
    table = yaml.safe_load(NEAR_MISSES.read_text())
    words = [word for line in table.values() for word in line.split()]
    assert sorted(words) == sorted(set(words))
    assert not set(words) & set(FLAGS)
    fields = {answer for answer in table if " " not in answer}
    settings = CliRunner().invoke(main, ["config", "show", "--sources"]).output
    assert [field for field in fields if f"\n{field} " not in settings] == []


@pytest.mark.parametrize("group", ["", "config", "checkpoint", "data", "plugins"])
def test_the_help_of_a_group_shows_whole_summaries(group: str) -> None:
    text = CliRunner().invoke(main, [*group.split(), "--help"]).output.partition("Commands:")[2]
    assert len(text.splitlines()) > 2
    assert "..." not in text


def test_a_config_file_with_another_extension_is_found_or_explained(cli_here: Cli, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("trainer: {steps: 3}")
    for word in ("run.yml", "run", "run.jml"):
        answer = cli_here("train", word)
        assert (answer.returncode, "did you mean 'run.yaml'?" in answer.stderr) == (2, True), answer.stderr
        assert "did you mean 'run.yaml'?" in cli_here("train", "--config", word).stderr
    assert "did you mean 'run.yaml'?" in cli_here("train", "rum.yaml").stderr
    assert cli_here("train", "--config", "other.yaml").stderr.endswith("use another file\n")
    (tmp_path / "own.yamll").write_text("trainer: {steps: 3}")
    both = "use --config own.yamll if it is a config file, or --data own.yamll to train on it"
    assert both in cli_here("train", "own.yamll").stderr
    assert shown(cli_here, "--config", "own.yamll")["trainer"]["steps"] == 3


def test_the_common_prefix_of_files_is_a_path(cli_here: Cli, tmp_path: Path) -> None:
    for suffix in ("bin", "idx"):
        (tmp_path / f"books.{suffix}").touch()
    assert shown(cli_here, "--data", "books")["data"]["path"] == "books"
    refused = cli_here("train", "--data", "books.bin")
    assert "train on it with --data indexed --set data.path=books" in refused.stderr


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def command(:\n", "SyntaxError: invalid syntax ({0}, line 1)"),
        ("import click\nimport clack\n", "ModuleNotFoundError: No module named 'clack' ({0}, line 2)"),
        (
            "from json import dumps\n\ndumps({1, 2})\n",
            "TypeError: Object of type set is not JSON serializable ({0}, line 3)",
        ),
        ("", "AttributeError: module 'broken_command' has no attribute 'command'"),
    ],
)
def test_a_command_that_cannot_be_imported_is_named_with_file_and_line(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_command.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_command", raising=False)
    entry = SimpleNamespace(target="broken_command:command", origin="acme 1.0")
    monkeypatch.setattr(OpenGroup, "added", lambda *_: {"broken": entry})
    refused = CliRunner().invoke(main, ["broken"])
    start = "command 'broken' (acme 1.0) cannot be imported: "
    assert f"{start}{message.format(tmp_path / 'broken_command.py')}" in refused.output
