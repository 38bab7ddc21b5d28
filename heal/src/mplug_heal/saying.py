"""Sentences for the user of a run."""

import logging
import sys

from mplug.run.run import Run

log = logging.getLogger("mplug")


def say(run: Run, sentence: str, level: int = logging.INFO) -> None:
    """Log a sentence and, on rank 0, print it to stderr."""
    log.log(level, "%s", sentence)
    if run.rank == 0:
        print(f"mplug: {sentence}", file=sys.stderr, flush=True)
