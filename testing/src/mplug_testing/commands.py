"""The suite for commands: subcommands that a plugin adds to `mplug`.

    from mplug_testing import CommandSuite

    class TestTally(CommandSuite):
        plugin = "tally"
        refused = (("--runs", "nowhere"),)

Its tests run `mplug` in separate processes in an empty folder, as a user would.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from mplug_testing.suite import PluginSuite, require, smoke

if TYPE_CHECKING:
    import click

HEAVY = ("torch", "numpy", "pydantic")
"""Modules that `--help` must not import."""
NO_SUCH_OPTION = "--no-such-option"

SCRIPT = """
import json, sys
sys.path[:] = {path!r}
status = 0
try:
    from mplug.cli import main
    main(sys.argv[1:], prog_name="mplug")
except SystemExit as end:
    status = end.code or 0
print("\\n" + json.dumps([status, sorted(sys.modules)]))
"""


@dataclass(frozen=True)
class Output:
    """The result of a call of `mplug`: its output, its exit status, and the modules that it imported."""

    out: str
    err: str
    status: int
    modules: frozenset[str]


class CommandSuite(PluginSuite):
    """The requirements for a command: no cost until it is called, help texts, and refusals in one sentence."""

    kind = "commands"
    uses_torch = False
    refused: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Wrong arguments, each split as the shell would split them.

    The command refuses each by a sentence and exit status 2.

    Give some for every subcommand that takes a value, beginning with the subcommand's own words.
    """

    @classmethod
    def fields(cls) -> dict[str, Any]:
        """Empty: a command has no config section."""
        return {}

    @smoke
    def test_it_keeps_the_contract(self) -> None:
        """It can be imported, and is a click command. No command of the host has its name."""
        from mplug.cli import COMMANDS
        from mplug_testing.inspection import inspect_here

        entry = self.entry()
        require(entry.name not in COMMANDS, f"'{entry.name}' is a command of the host, which goes first; rename it")
        fault = inspect_here(self.kind, f"{entry.distribution}/{entry.name}").fault
        require(not fault, f"{entry.label} ({entry.origin}): {fault}")

    @smoke
    def test_neither_importing_nor_configuring_it_imports_torch(self) -> None:
        """Nor other slow modules: help and completion must be fast."""
        output = self._output("--help")
        heavy = [name for name in HEAVY if name in output.modules]
        require(not heavy, f"'{self._call()} --help' imports {', '.join(heavy)}; import it where it is used")

    # A command has no config fields, so these tests of the base class do not apply.
    test_its_config_survives_being_saved_and_read_again = None  # type: ignore[assignment]
    test_an_unknown_field_is_an_error_that_names_it = None  # type: ignore[assignment]
    test_every_field_of_its_config_has_an_effect = None  # type: ignore[assignment]

    @smoke
    def test_it_explains_itself(self) -> None:
        """`mplug NAME --help` works in an empty folder."""
        output = self._output("--help")
        end = _end_of(output.err, output.out)
        require(output.status == 0, f"'{self._call()} --help' ends with status {output.status}: {end}")
        usage = f"Usage: {self._call()}"
        first = output.out.strip().partition("\n")[0]
        require(first.startswith(usage), f"'{self._call()} --help' begins with '{first}', not with '{usage}'")

    @smoke
    def test_it_is_listed_without_being_imported(self) -> None:
        """The help of `mplug`, or of its group, shows the summary of its distribution."""
        *group, name = self._words()
        output, entry, call = output_of(*group, "--help"), self.entry(), " ".join(("mplug", *group, "--help"))
        module = entry.target.partition(":")[0]
        require(module not in output.modules, f"'{call}' imports '{module}'")
        require(entry.summary, f"'{call}' shows no summary, because {entry.distribution} has no description")
        listed = [line for line in output.out.splitlines() if line.split()[:1] == [name]]
        require(listed, f"'{call}' does not list '{name}'")

    @smoke
    def test_every_command_and_option_has_a_help_text(self) -> None:
        """Including subcommands."""
        for name, command in self._commands():
            require(command.help, f"'{name}' has no help text; give its function a docstring")
            for parameter in command.params:
                if parameter.param_type_name == "option":
                    described = getattr(parameter, "help", None)
                    require(described, f"option '{parameter.opts[-1]}' of '{name}' has no help text")

    @smoke
    def test_an_unknown_option_is_an_error_that_names_it(self) -> None:
        """A misspelt option must never be ignored."""
        for name, _ in self._commands():
            status, err, end = refusal_of(*name.split()[1:], NO_SUCH_OPTION)
            require(status == 2, f"'{name} {NO_SUCH_OPTION}' ends with status {status}, not 2: {end}")
            require(NO_SUCH_OPTION in err, f"the error of '{name} {NO_SUCH_OPTION}' does not name the option")

    def test_wrong_arguments_are_known_of_every_command(self) -> None:
        """If `refused` has none for a command, the first user finds the traceback."""
        for name, command in self._commands():
            words = tuple(name.removeprefix(self._call()).split())
            takes = [parameter for parameter in command.params if not getattr(parameter, "is_flag", False)]
            if takes and not hasattr(command, "commands"):
                require(
                    any(arguments[: len(words)] == words for arguments in self.refused),
                    f"`refused` has no wrong arguments for '{name}', which takes '{takes[0].name}'; add some",
                )

    def test_wrong_arguments_are_refused_in_a_sentence(self) -> None:
        """For the arguments in `refused`, it raises `mplug.UsageError`, which states problem, place and remedy."""
        for arguments in self.refused:
            (status, err, end), line = refusal_of(*self._words(), *arguments), " ".join((self._call(), *arguments))
            require("Traceback" not in err, f"'{line}' ends in a traceback: {end}; raise mplug.UsageError")
            require(status == 2, f"'{line}' ends with status {status}, not 2: {end}")
            require(err.strip(), f"'{line}' prints no error message")

    def _output(self, *arguments: str) -> Output:
        return output_of(*self._words(), *arguments)

    def _words(self) -> list[str]:
        """The words that call the command: an entry point 'plugins.new' is called by 'plugins' and 'new'."""
        distribution, slash, name = self.plugin.rpartition("/")
        *group, last = name.split(".")
        return [*group, f"{distribution}{slash}{last}"]

    def _call(self) -> str:
        return " ".join(("mplug", *self._words()))

    def _commands(self) -> "Iterator[tuple[str, click.Command]]":
        """The command and its subcommands, each with the words that call it."""
        from importlib import import_module

        module, _, attribute = self.entry().target.partition(":")
        yield from _below(self._call(), getattr(import_module(module), attribute))


def _below(name: str, command: Any) -> "Iterator[tuple[str, click.Command]]":
    yield name, command
    for child in getattr(command, "commands", {}).values():
        yield from _below(f"{name} {child.name}", child)


def output_of(*arguments: str) -> Output:
    """Call `mplug` in a separate process in an empty folder."""
    code = SCRIPT.format(path=sys.path)
    with TemporaryDirectory(prefix="mplug-command-") as folder:
        command = [sys.executable, "-c", code, *arguments]
        finished = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    out, _, last = finished.stdout.rstrip("\n").rpartition("\n")
    try:
        status, modules = json.loads(last)
    except ValueError:  # the process ended before SCRIPT printed its last line
        return Output(finished.stdout, finished.stderr, finished.returncode, frozenset())
    return Output(out, finished.stderr, status, frozenset(modules))


def refusal_of(*arguments: str) -> tuple[int, str, str]:
    """(exit status, errors, last line) of `mplug` in a separate process in an empty folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with TemporaryDirectory(prefix="mplug-command-") as folder:
        command = [sys.executable, "-m", "mplug", *arguments]
        finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return finished.returncode, finished.stderr, _end_of(finished.stderr, finished.stdout)


def _end_of(err: str, out: str) -> str:
    lines: Sequence[str] = (err.strip() or out.strip() or "it prints nothing").splitlines()
    return lines[-1]
