"""What a user gets wrong comes back as one message that says what, where and what to do: the rows of refusals.yaml.

The commands run in this process; tests/test_bad_input.py has the few that need one of their own.
"""

import shlex
from pathlib import Path

import pytest
import yaml
from command_line import Cli, assert_refused

from mplug.config.defaults import default_settings
from mplug.config.sources import read_assignments
from mplug.errors import UsageError
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare

ROWS = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())


@pytest.mark.parametrize("options", ROWS["options"])
def test_options_are_refused_with_their_path_their_source_and_the_remedy(cli_here: Cli, options: str) -> None:
    assert_refused(cli_here("config", "show", *shlex.split(options)), ROWS["options"][options])


@pytest.mark.parametrize("command", ROWS["commands"])
def test_commands_are_refused_with_the_remedy_and_leave_nothing(cli_here: Cli, tmp_path: Path, command: str) -> None:
    assert_refused(cli_here(*shlex.split(command)), ROWS["commands"][command])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("settings", ROWS["data"])
def test_data_that_a_run_cannot_read_is_refused_before_the_run_is_announced(
    cli_here: Cli, tiny: list[str], tmp_path: Path, settings: str
) -> None:
    (tmp_path / "empty").mkdir()
    for name, content in {"nothing.txt": "", "one.txt": "x", "cut.idx": "MMIDIDX\0\0\1", "cut.bin": ""}.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "text.txt").write_text("some text\n" * 1000)
    before = sorted(tmp_path.iterdir())
    fields = [word for field in settings.split() for word in ("--set", field)]
    result = cli_here("train", *tiny, *fields, "--name", "mine")
    assert_refused(result, ROWS["data"][settings])
    assert result.stdout == ""
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("text", "words"), [(text, words) for text, *words in ROWS["files"]])
def test_a_config_file_is_refused_with_its_line(cli_here: Cli, tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert_refused(cli_here("config", "show", "--config", "run.yaml"), words)


@pytest.mark.parametrize("settings", ROWS["settings"])
def test_settings_that_no_run_can_use_are_refused_in_one_short_line(settings: str) -> None:
    with pytest.raises(UsageError) as refused:
        prepare(resolve(Registry(), default_settings(), read_assignments(settings.split())))
    message = str(refused.value)
    assert [word for word in ROWS["settings"][settings] if word not in message] == [], message
    assert "\n" not in message
    assert len(message) < 300
