"""The tasks that a command asks for."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Wanted:
    """The tasks, and how they are run."""

    tasks: tuple[str, ...]
    include_paths: tuple[Path, ...]
    num_fewshot: int | None
    limit: float | None
    gen_kwargs: str
    batch_size: int
    max_length: int | None
    seed: int
    log_samples: bool
    bootstrap_iters: int
