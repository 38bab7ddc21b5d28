"""The files of a checkpoint of DeepSpeed's engine: which ranks have saved them, and whether any is absent."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mplug import RunError, UsageError

LATEST = ("latest", "latest_universal")
"""The files that name the newest tag of a folder, the first of which counts."""
UNIVERSAL = "zero"
"""The folder that a universal checkpoint has."""
OPTIMIZER = re.compile(r"(?P<kind>(?:bf16_|fp16_)?)zero_pp_rank_(?P<data>\d+)_mp_rank_(?P<part>\d+)_optim_states\.pt")
MODEL = re.compile(r"(?:zero_pp_rank_(?P<data>\d+)_)?mp_rank_(?P<part>\d+)_model_states\.pt")
FOREIGN = (
    (re.compile(r"layer_\d+-.*model_states\.pt"), "pipeline stages"),
    (re.compile(r".*expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_.*"), "experts on several ranks"),
)
"""Files of parallel layouts that an import cannot join."""
Ranks = Mapping[int, Mapping[int, Path]]
"""By tensor-parallel rank, the files of the data-parallel ranks."""


@dataclass(frozen=True)
class RankFiles:
    """The files of a tag. Without ZeRO there are no optimizer files; model files are one per part, or (ZeRO 3) rank."""

    path: Path
    model: Ranks
    optimizer: Ranks
    sharded_model: bool


def tag_folder(folder: Path) -> Path:
    """The folder of the newest tag in a folder, or the folder itself if it has no file that names one."""
    for name in LATEST:
        try:
            tag = (folder / name).read_text().strip()
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise RunError(f"cannot read '{folder / name}': {error}") from error
        if not tag or Path(tag).name != tag:
            raise UsageError(f"'{folder / name}' names no folder; name the folder of a tag instead of '{folder}'")
        if not (folder / tag).is_dir():
            raise UsageError(f"'{folder / name}' names '{tag}', and there is no such folder; copy the checkpoint again")
        return folder / tag
    return folder


def find_files(path: Path) -> RankFiles:
    """The files in the folder of a tag. UsageError if it has none, or if those of a layout cannot be joined."""
    model, optimizer = dict[int, dict[int, Path]](), dict[int, dict[int, Path]]()
    sharded = False
    for file in sorted(path.iterdir()):
        for pattern, layout in FOREIGN:
            if pattern.fullmatch(file.name):
                raise UsageError(
                    f"'{path}' has '{file.name}', a file of {layout}, which mplug cannot join; convert the checkpoint "
                    f"to a universal one (python -m deepspeed.checkpoint.ds_to_universal), and import that"
                )
        if hit := MODEL.fullmatch(file.name):
            model.setdefault(int(hit["part"]), {})[int(hit["data"] or 0)] = file
            sharded |= hit["data"] is not None
        elif hit := OPTIMIZER.fullmatch(file.name):
            optimizer.setdefault(int(hit["part"]), {})[int(hit["data"])] = file
    if not model:
        raise UsageError(
            f"'{path}' is no checkpoint of DeepSpeed: it has no file '..._model_states.pt'; name the folder that "
            f"save_checkpoint has written, or one of its tags"
        )
    return RankFiles(path, model, optimizer, sharded)


def refuse_absent(files: Mapping[int, Path], count: int) -> None:
    """Raise UsageError unless a folder has the files of the first `count` ranks; it names the first absent file."""
    name = next(iter(files.values())).name
    for rank in range(count):
        if rank not in files:
            absent = re.sub(r"zero_pp_rank_\d+", f"zero_pp_rank_{rank}", name)
            raise UsageError(
                f"'{next(iter(files.values())).parent}' lacks '{absent}': {count} data-parallel ranks have saved it; "
                f"copy the files of all ranks into one folder"
            )
    refuse_more(files, count)


def refuse_more(files: Mapping[int, Path], count: int) -> None:
    """Raise UsageError for a file of a rank that the saved run did not have: those of an earlier save are left."""
    if more := [file for rank, file in sorted(files.items()) if rank >= count]:
        raise UsageError(
            f"'{more[0].parent}' has '{more[0].name}', but {count} data-parallel ranks have saved the checkpoint; "
            f"remove the files of another save"
        )


def refuse_absent_parts(path: Path, parts: Iterable[int], count: int) -> None:
    """Raise UsageError unless the files of all tensor-parallel ranks are there."""
    parts = set(parts)
    if absent := [part for part in range(count) if part not in parts]:
        raise UsageError(
            f"'{path}' lacks the files 'mp_rank_{absent[0]:02d}': {count} tensor-parallel ranks have saved it; "
            f"copy the files of all ranks into one folder"
        )
