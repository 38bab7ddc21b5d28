"""The suite for commands: a sound third-party command passes it, and it catches what authors of commands get wrong."""

from collections.abc import Callable

import pytest
from mplug_testing import CommandSuite, Fault


class Tally(CommandSuite):
    plugin = "tally"
    refused = (("--runs", "nowhere"),)


class Untried(CommandSuite):
    plugin = "tally"


@pytest.mark.wide("suites")
def test_a_sound_command_passes(own_tests: Callable[..., str]) -> None:
    assert "failed" not in own_tests("nova-tally")


IMPORTS = "import click\n\nfrom mplug import UsageError"
COMMAND = "@click.command()\n"
NO_RUN = "raise UsageError(f\"there is no run in '{folder}'; name the folder of your runs with --runs\")"
EXPLAINED = '''"""Tell what runs have had: steps, tokens, hours.

    Of all runs, or of those that are named. Hours are those of the training steps, without evaluations and checkpoints.
    """'''

FAULTS = {
    "nobody has tried wrong arguments": (
        COMMAND,
        COMMAND,
        lambda: Untried().test_wrong_arguments_are_known_of_every_command(),
        "`refused` has no wrong arguments for 'mplug tally', which takes 'names'; add some",
    ),
    "it does not import": (
        IMPORTS,
        f"import clack\n{IMPORTS}",
        lambda: Tally().test_it_keeps_the_contract(),
        "commands/tally (nova-tally 1.0.0): it cannot be imported: ModuleNotFoundError(\"No module named 'clack'\")",
    ),
    "importing it ends the process": (
        IMPORTS,
        f"{IMPORTS}\n\nraise SystemExit(0)",
        lambda: Tally().test_it_keeps_the_contract(),
        "it cannot be imported: SystemExit(0)",
    ),
    "its function is no command": (
        COMMAND,
        "",
        lambda: Tally().test_it_keeps_the_contract(),
        "'nova_tally.cli:tally' is not a click command",
    ),
    "help waits for torch": (
        IMPORTS,
        f"import torch\n{IMPORTS}",
        lambda: Tally().test_neither_importing_nor_configuring_it_imports_torch(),
        "'mplug tally --help' imports torch, numpy; import it where it is used",
    ),
    "help waits for pydantic": (
        IMPORTS,
        f"import pydantic\n{IMPORTS}",
        lambda: Tally().test_neither_importing_nor_configuring_it_imports_torch(),
        "'mplug tally --help' imports pydantic; import it where it is used",
    ),
    "it has no --help": (
        COMMAND,
        "@click.command(add_help_option=False)\n",
        lambda: Tally().test_it_explains_itself(),
        "'mplug tally --help' ends with status 2: Error: No such option",
    ),
    "it imports only where there are runs": (
        'default=Path("runs"),',
        'default=min(Path("runs").iterdir()).parent,',
        lambda: Tally().test_it_explains_itself(),
        "'mplug tally --help' ends with status 2: mplug: command 'tally' (nova-tally 1.0.0) cannot be imported",
    ),
    "importing it prints": (
        IMPORTS,
        f"{IMPORTS}\n\nprint('tally 1.0.0')",
        lambda: Tally().test_it_explains_itself(),
        "'mplug tally --help' begins with 'tally 1.0.0', not with 'Usage: mplug tally'",
    ),
    "it has no help text": (
        EXPLAINED,
        "",
        lambda: Tally().test_every_command_and_option_has_a_help_text(),
        "'mplug tally' has no help text; give its function a docstring",
    ),
    "an option has no help text": (
        'help="What to sort by; numbers from the greatest down.",',
        "",
        lambda: Tally().test_every_command_and_option_has_a_help_text(),
        "option '--by' of 'mplug tally' has no help text",
    ),
    "a misspelt option is taken for a name": (
        COMMAND,
        '@click.command(context_settings={"ignore_unknown_options": True})\n',
        lambda: Tally().test_an_unknown_option_is_an_error_that_names_it(),
        "the error of 'mplug tally --no-such-option' does not name the option",
    ),
    "wrong arguments end in a traceback": (
        NO_RUN,
        'raise ValueError(f"no run in {folder}")',
        lambda: Tally().test_wrong_arguments_are_refused_in_a_sentence(),
        "'mplug tally --runs nowhere' ends in a traceback: ValueError: no run in nowhere; raise mplug.UsageError",
    ),
    "wrong arguments are taken for the world's fault": (
        NO_RUN,
        'raise click.ClickException(f"no run in {folder}")',
        lambda: Tally().test_wrong_arguments_are_refused_in_a_sentence(),
        "'mplug tally --runs nowhere' ends with status 1, not 2: Error: no run in nowhere",
    ),
    "wrong arguments are taken for done": (
        NO_RUN,
        'click.echo(f"no run in {folder}")',
        lambda: Tally().test_wrong_arguments_are_refused_in_a_sentence(),
        "'mplug tally --runs nowhere' ends with status 0, not 2: RUN",
    ),
    "wrong arguments are refused without a word": (
        NO_RUN,
        "raise SystemExit(2)",
        lambda: Tally().test_wrong_arguments_are_refused_in_a_sentence(),
        "'mplug tally --runs nowhere' prints no error message",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_suite_catches_a_command_of_which(fault: str, plant: Callable[..., None]) -> None:
    old, new, check, words = FAULTS[fault]
    plant("nova-tally", old, new)
    with pytest.raises(Fault) as caught:
        check()
    assert words in str(caught.value)
