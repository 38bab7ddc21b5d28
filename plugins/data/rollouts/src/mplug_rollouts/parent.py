"""Processes beside a run that end with it, also if it is killed. Imports no torch."""

import os
import time
from threading import Thread

SECONDS = 0.5
"""Seconds between two looks at the parent."""


def end_with_parent(parent: int) -> None:
    """End this process when the process `parent`, which has started it, has ended, whatever this one does."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(SECONDS)
        os._exit(1)

    Thread(target=watch, daemon=True).start()
