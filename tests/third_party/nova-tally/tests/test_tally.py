"""Tally: mplug's suite for commands, and what is tally's own: the totals of real metrics."""

import json
from pathlib import Path

import click.testing
import pytest
from mplug_testing import CommandSuite
from nova_tally.cli import tally
from nova_tally.metrics import tally_of

from mplug import UsageError


class TestTally(CommandSuite):
    plugin = "tally"
    refused = ((), ("--runs", "nowhere"), ("--by", "colour"))


def trained(folder: Path, name: str, steps: int, tokens: int = 7200, tokens_per_s: float = 100.0) -> Path:
    """A run whose every step has so many tokens."""
    directory = folder / name
    directory.mkdir(parents=True)
    lines = [
        {"step": step, "loss": 2.0, "tokens": step * tokens, "tokens_per_s": tokens_per_s}
        for step in range(1, steps + 1)
    ]
    directory.joinpath("metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def told(folder: Path, *arguments: str) -> list[list[str]]:
    result = click.testing.CliRunner().invoke(tally, ["--runs", str(folder), *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return [line.split() for line in result.output.splitlines()]


def test_tokens_and_time_add_up_over_steps(tmp_path: Path) -> None:
    found = tally_of(trained(tmp_path, "one", steps=50))
    assert (found.steps, found.tokens) == (50, 360_000)
    assert found.hours == pytest.approx(1.0)


def test_steps_of_another_speed_count_by_their_own(tmp_path: Path) -> None:
    directory = trained(tmp_path, "one", steps=1)
    with (directory / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 2, "tokens": 7200 + 3600, "tokens_per_s": 1.0}) + "\n")
    assert tally_of(directory).hours == pytest.approx(72 / 3600 + 1.0)


def test_several_runs_have_a_line_each_and_one_for_all(tmp_path: Path) -> None:
    for name, steps in (("short", 10), ("long", 100)):
        trained(tmp_path, name, steps)
    assert told(tmp_path) == [
        ["RUN", "STEPS", "TOKENS", "HOURS"],
        ["long", "100", "720,000", "2.00"],
        ["short", "10", "72,000", "0.20"],
        ["all", "110", "792,000", "2.20"],
    ]
    assert told(tmp_path, "short")[1:] == [["short", "10", "72,000", "0.20"]]


@pytest.mark.parametrize(("by", "first"), [("name", "a"), ("steps", "b"), ("tokens", "c"), ("hours", "a")])
def test_runs_are_sorted_by_what_the_user_asks_for(tmp_path: Path, by: str, first: str) -> None:
    trained(tmp_path, "a", steps=2, tokens=100, tokens_per_s=0.1)
    trained(tmp_path, "b", steps=9, tokens=100)
    trained(tmp_path, "c", steps=1, tokens=9999)
    assert told(tmp_path, "--by", by)[1][0] == first


def test_the_unfinished_last_line_of_a_killed_run_is_passed_over(tmp_path: Path) -> None:
    directory = trained(tmp_path, "one", steps=3)
    with (directory / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 4, "tok')
    assert tally_of(directory).steps == 3


@pytest.mark.parametrize("line", ["no JSON", "[]", "7", '{"step": 4}', '{"tokens": 5, "tokens_per_s": 0}'])
def test_a_line_that_is_no_steps_is_refused_by_its_file_and_number(tmp_path: Path, line: str) -> None:
    directory = trained(tmp_path, "one", steps=3)
    with (directory / "metrics.jsonl").open("a") as metrics:
        metrics.write(f"{line}\n")
    with pytest.raises(UsageError, match=r"metrics\.jsonl:4 is not a step's line"):
        tally_of(directory)


def test_a_run_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    trained(tmp_path, "one", steps=1)
    with pytest.raises(UsageError, match=r"there is no run 'two' in .* \(there: one\)"):
        told(tmp_path, "two")
