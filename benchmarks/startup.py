"""CPU time of the commands that import no torch, over that of `python -c pass` in the same environment.

    python benchmarks/startup.py

It is the time of the process in user and system mode, which depends little on other work of the machine. Prints the
least of ten of each, and the limits that the project sets itself: 8 times for help, 10 times for listing and
completion, 25 times for whatever validates a config.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path

MPLUG = str(Path(sys.executable).with_name("mplug"))
COMPLETION = {"_MPLUG_COMPLETE": "bash_complete", "COMP_WORDS": "mplug train --model ", "COMP_CWORD": "3"}
CASES: list[tuple[str, list[str], dict[str, str], int]] = [
    ("mplug --help", [MPLUG, "--help"], {}, 8),
    ("mplug plugins list", [MPLUG, "plugins", "list"], {}, 10),
    ("completion of --model", [MPLUG], COMPLETION, 10),
    ("mplug config show", [MPLUG, "config", "show"], {}, 25),
    ("a refused config", [MPLUG, "train", "--set", "trainer.stpes=1"], {}, 25),
]


def best_of_ten(command: list[str], environment: dict[str, str]) -> float:
    """The least CPU seconds of ten runs of a command."""
    seconds = []
    for _ in range(10):
        before = of_children()
        subprocess.run(command, env={**os.environ, **environment}, capture_output=True, check=False)
        seconds.append(of_children() - before)
    return min(seconds)


def of_children() -> float:
    """The CPU seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print the table."""
    unit = best_of_ten([sys.executable, "-c", "pass"], {})
    print(f"python -c pass: {unit * 1e3:.1f} ms (best of 10)\n")
    print(f"{'command':<24}{'ms':>8}{'ratio':>8}{'limit':>8}")
    for name, command, environment, limit in CASES:
        took = best_of_ten(command, environment)
        print(f"{name:<24}{took * 1e3:>8.1f}{took / unit:>8.1f}{limit:>8}")


if __name__ == "__main__":
    main()
