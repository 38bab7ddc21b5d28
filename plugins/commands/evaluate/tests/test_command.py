"""mplug evaluate keeps the contract of commands. The other files test what it measures."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from mplug_evaluate import command

from mplug_testing import CommandSuite


class TestEvaluate(CommandSuite):
    plugin = "evaluate"
    refused = (
        ("--name", "nowhere"),
        ("nowhere.txt",),
        (".",),
        ("--samples", "0"),
        ("--samples", "most"),
        ("--stride", "4"),
        ("--adapt", "lora"),
        ("--pretrained", "."),
        ("--pretrained", "nowhere", "--data", "text"),
        ("--pretrained", ".", "--name", "both"),
        ("--set", "steps=3"),
    )


def test_a_folder_in_the_place_of_a_file_is_refused_with_what_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    (tmp_path / "texts").mkdir()
    for word, meant in {
        "model": "'model' is a folder; to evaluate the model in it, use --pretrained model, and name files of text",
        "runs/mine": "'runs/mine' is a folder; to evaluate the run 'runs/mine', use --name mine",
        "texts": "'texts' is a folder; name its files, as in texts/*.txt",
        "mine": "there is no file 'mine'; to evaluate the run 'mine', use --name mine",
        "other": "there is no file 'other'; name a file of text",
    }.items():
        refused = CliRunner().invoke(command, [word])
        assert refused.exit_code == 2
        assert meant in " ".join(refused.output.split())
