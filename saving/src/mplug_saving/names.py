"""The names of checkpoints and of their manifests."""

from pathlib import Path

MANIFEST = "checkpoint.json"
SUFFIX = ".safetensors"
ELSEWHERE = "local_checkpoints"
"""The file in the folder of a run whose state is also saved elsewhere: it can be resumed without a checkpoint."""


def path_of(folder: Path, step: int) -> Path:
    """The folder of the complete checkpoint of a step."""
    return folder / f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint."""
    return int(path.name.removeprefix("step_"))


def partial_path(final: Path) -> Path:
    """The folder for an incomplete checkpoint: one that is being written, or one that is being removed."""
    return final.with_name(f".{final.name}.partial")


def file_of(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank{rank:05d}{SUFFIX}"
