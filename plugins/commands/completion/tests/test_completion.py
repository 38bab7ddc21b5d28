"""mplug completion: what shells read after it, and what it leaves of the user's own files."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mplug.cli import main
from mplug_testing import CommandSuite

BASH = """
complete -p mplug
COMP_WORDS=(mplug train --model g) COMP_CWORD=3; _mplug_completion mplug; echo "names: ${COMPREPLY[*]}"
COMPREPLY=() COMP_WORDS=(mplug tr) COMP_CWORD=1; _mplug_completion mplug; echo "commands: ${COMPREPLY[*]}"
"""


class TestCompletion(CommandSuite):
    plugin = "completion"
    refused = tuple((word, "--shell", "tcsh") for word in ("install", "show", "remove"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without files, for which nothing else is set."""
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", "/usr/bin/bash")
    monkeypatch.setenv("PATH", os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    return tmp_path


def printed(*words: str, status: int = 0) -> str:
    done = CliRunner().invoke(main, ["completion", *words])
    assert done.exit_code == status, f"{done.output}\n{done.exception!r}"
    return done.output


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_new_bash_completes_commands_and_names_of_plugins(home: Path) -> None:
    assert "new shells complete mplug" in printed("install")
    done = subprocess.run(["bash", "-ic", BASH], capture_output=True, text=True, cwd=home, stdin=subprocess.DEVNULL)
    assert "-F _mplug_completion mplug" in done.stdout, done
    names = next(line for line in done.stdout.splitlines() if line.startswith("names: ")).split()[1:]
    assert {"gpt", "gemma"} <= set(names)
    assert all(name.startswith("g") for name in names)
    assert "commands: train\n" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_second_call_changes_nothing_and_removing_restores_the_users_files(home: Path, shell: str) -> None:
    (home / ".bashrc").write_bytes(b"alias l=ls\n\xff")
    (home / "dotfiles").mkdir()
    (home / "dotfiles" / "zshrc").write_text("setopt nobeep\n")
    (home / "dotfiles" / "zshrc").chmod(0o600)
    (home / ".zshrc").symlink_to("dotfiles/zshrc")
    before = files_of(home)
    assert "wrote" in printed("install", "--shell", shell)
    first = files_of(home)
    assert printed("install", "--shell", shell) == f"the completion for {shell} is installed already\n"
    assert files_of(home) == first
    assert (home / ".zshrc").is_symlink()
    assert (home / "dotfiles" / "zshrc").stat().st_mode & 0o777 == 0o600
    assert "removed" in printed("remove", "--shell", shell)
    ended = {**before, ".bashrc": before[".bashrc"] + b"\n"} if shell == "bash" else before
    assert files_of(home) == ended
    assert printed("remove", "--shell", shell) == f"the completion for {shell} is not installed\n"


def test_a_line_of_another_folder_is_replaced(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed("install")
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "my data"))
    printed("install")
    (line,) = (home / ".bashrc").read_text().splitlines()
    assert line.startswith(f"[ -r '{home}/my data/mplug/completion.bash' ] && . '{home}/my data/mplug/completion.bash'")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_that_the_shell_parses(home: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = home / "script"
    script.write_text(printed("show", "--shell", shell))
    subprocess.run([shell, "-n", script], check=True)


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("/bin/tcsh", "the completion is for bash, zsh and fish, not for 'tcsh'"),
        ("", "$SHELL is not set"),
    ],
)
def test_another_shell_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch, variable: str, message: str) -> None:
    monkeypatch.setenv("SHELL", variable)
    assert printed("install", status=2) == f"mplug: {message}; name one of them with --shell\n"
    assert files_of(home) == {}
