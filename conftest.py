"""Two files are tested at a time, so whoever computes does it with one thread: more than there are cores only wait."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch
