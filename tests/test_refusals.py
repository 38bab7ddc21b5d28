"""What a user gets wrong comes back as one message that says what, where and what to do: the rows of refusals.yaml.

The commands run in this process; tests/test_bad_input.py has the few that need one of their own.
"""

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from mplug.config.defaults import default_settings
from mplug.config.sources import read_assignments
from mplug.errors import UsageError
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare

Cli = Callable[..., subprocess.CompletedProcess[str]]
ROWS = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())


def assert_refused(result: subprocess.CompletedProcess[str], words: list[str]) -> None:
    """The user's input is wrong: exit status 2 and a message with these words, without a traceback."""
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("mplug:")
    assert [word for word in words if word not in result.stderr] == [], result.stderr


@pytest.mark.parametrize("options", ROWS["options"])
def test_options_are_refused_with_their_path_their_source_and_the_remedy(cli_here: Cli, options: str) -> None:
    assert_refused(cli_here("config", "show", *shlex.split(options)), ROWS["options"][options])


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
