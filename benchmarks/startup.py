"""How long the commands that import no torch take, over the time of `python -c pass` in the same environment.

    python benchmarks/startup.py

Prints the best of ten of each, and the limits that the project sets itself: 8 times for help, 10 times for listing and
completion, 25 times for whatever validates a config.
"""

import os
import subprocess
import sys
import time
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
    """Seconds of the fastest of ten runs of a command."""
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        subprocess.run(command, env={**os.environ, **environment}, capture_output=True, check=False)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


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
