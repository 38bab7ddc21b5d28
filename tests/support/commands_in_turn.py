"""Run by the interpreter of another environment: several commands of mplug, and torch imported once.

    python commands_in_turn.py '[["train"], ["explain"]]'

Every command runs in a fork of this process. A first word '+FOLDER' adds the packages of a folder for this command.
Prints a JSON list of [exit status, standard output, standard error].
"""

import json
import os
import sys
import tempfile


def outcome(words: list[str]) -> tuple[int, str, str]:
    """Run one command in a fork."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            if words[0].startswith("+"):
                sys.path.append(words[0][1:])
            sys.argv = ["mplug", *(words[1:] if words[0].startswith("+") else words)]
            main(prog_name="mplug")
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        out.seek(0)
        err.seek(0)
        return os.waitstatus_to_exitcode(status), out.read().decode(), err.read().decode()


if __name__ == "__main__":
    import torch  # noqa: F401

    import mplug.run.prepare
    import mplug.training.loop  # noqa: F401  # once for all commands
    from mplug.cli import main

    print(json.dumps([outcome(words) for words in json.loads(sys.argv[1])]))
