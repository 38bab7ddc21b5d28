"""Where the completion of each shell is, and what is in its files."""

import os
import shlex
from pathlib import Path

import click
from click.shell_completion import get_completion_class

NAMES = ("bash", "zsh", "fish")
PROGRAM = "mplug"
VARIABLE = "_MPLUG_COMPLETE"
"""The variable by which the script asks `mplug` for completions."""
MARK = "# added by: mplug completion install"
"""The end of the line that sources the script."""
START_COMPLETION = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }\n"
"""Zsh completes by functions only after this."""


class Shell:
    """The files of one shell."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def script(self) -> Path:
        """The file that completes mplug."""
        if self.name == "fish":
            return _folder("XDG_CONFIG_HOME", ".config") / "fish" / "completions" / f"{PROGRAM}.fish"
        return _folder("XDG_DATA_HOME", ".local/share") / PROGRAM / f"completion.{self.name}"

    @property
    def startup(self) -> Path | None:
        """The user's file that the shell reads at its start; None for fish, which reads the folder of the script."""
        folder = Path(os.environ.get("ZDOTDIR") or Path.home()) if self.name == "zsh" else Path.home()
        return None if self.name == "fish" else (folder / f".{self.name}rc").resolve()

    def source(self) -> str:
        """The text of the script."""
        complete = get_completion_class(self.name)
        assert complete is not None, self.name
        text = complete(click.get_current_context().find_root().command, {}, PROGRAM, VARIABLE).source()
        return f"{START_COMPLETION if self.name == 'zsh' else ''}{text.strip()}\n"

    def install(self) -> list[Path]:
        """Write what is missing or differs; return the files that were written."""
        changed = [self.script] if _write(self.script, self.source().encode()) else []
        if self.startup is not None:
            path = shlex.quote(str(self.script))
            line = f"[ -r {path} ] && . {path}  {MARK}\n".encode()
            present = _content(self.startup)
            lines = present.splitlines(keepends=True)
            if line not in lines:
                kept = b"".join(one for one in lines if MARK.encode() not in one)
                _write(self.startup, kept + (b"\n" if kept and not kept.endswith(b"\n") else b"") + line)
                changed.append(self.startup)
        return changed

    def remove(self) -> list[Path]:
        """Remove the script and the line that sources it; return the files that were removed or changed."""
        changed = []
        if self.script.exists():
            self.script.unlink()
            changed.append(self.script)
        if self.startup is not None:
            lines = _content(self.startup).splitlines(keepends=True)
            kept = [line for line in lines if MARK.encode() not in line]
            if kept != lines:
                _write(self.startup, b"".join(kept))
                changed.append(self.startup)
        return changed


def _folder(variable: str, default: str) -> Path:
    """A folder of the user, as the XDG base directory specification names it."""
    return Path(os.environ.get(variable) or Path.home() / default)


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _write(path: Path, content: bytes) -> bool:
    """Write a file unless it has this content: whether it was written."""
    from mplug import write_whole

    if path.exists() and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = path.stat().st_mode if path.exists() else None
    write_whole(path, content)
    if mode is not None:
        path.chmod(mode)
    return True
