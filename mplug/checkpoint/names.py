"""The names of checkpoints and of the files in them."""

from pathlib import Path

MANIFEST = "checkpoint.json"
SUFFIX = ".safetensors"


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is, once it is complete."""
    return folder / f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint."""
    return int(path.name.removeprefix("step_"))


def aside_of(final: Path) -> Path:
    """Where a checkpoint is written before it is complete, and where an old one goes before it is removed."""
    return final.with_name(f".{final.name}.partial")


def file_of(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank{rank:05d}{SUFFIX}"
