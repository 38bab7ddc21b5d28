"""Finds the files of a data set, and reads their rows with Hugging Face's library. Never contacts a network."""

import glob
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mplug import UsageError, local_path

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"  # before the library reads them

import datasets
import datasets.config

datasets.config.HF_HUB_OFFLINE = True  # if something has imported the library before

if TYPE_CHECKING:
    from datasets import IterableDataset

BUILDERS = {
    ".jsonl": "json",
    ".json": "json",
    ".jsonl.gz": "json",
    ".json.gz": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""Suffix of a file -> the library's reader."""
KINDS = ".jsonl, .json, .parquet or .arrow"
SAVED, SAVED_SPLITS = ("state.json", "dataset_info.json"), "dataset_dict.json"
"""The files that save_to_disk writes: beside one data set, and beside a folder for each split."""
DESCRIPTIONS = {"state.json", "dataset_info.json", "dataset_dict.json", "dataset_infos.json"}
PLACES, PIECE = 64, 4096
"""A fingerprint of a file reads this number of pieces of this number of bytes."""


@dataclass(frozen=True)
class Source:
    """One path of the data, and the files of one of its splits, in their order."""

    path: str
    files: tuple[str, ...]

    def fingerprint(self) -> str:
        """A hash of the files' sizes and of pieces of their contents, wherever the files are."""
        found = blake2b(digest_size=16)
        for file in self.files:
            size = os.path.getsize(file)
            found.update(size.to_bytes(8, "little"))
            with open(file, "rb") as content:
                for place in sorted({size * number // PLACES for number in range(PLACES)} | {max(0, size - PIECE)}):
                    content.seek(place)
                    found.update(content.read(PIECE))
        return found.hexdigest()


def joined(sources: Sequence[Source]) -> Source:
    """Several sources as one, in order."""
    return Source(", ".join(one.path for one in sources), tuple(file for one in sources for file in one.files))


def find_source(path: str, split: str, field: str) -> Source:
    """The files of a split of a path or address; raises UsageError if there is nothing, or no such split."""
    place = local_path(path)
    if place.is_dir():
        files = _saved(place, path, split, field) or _of_folder(place, path, split, field)
    else:
        found = [place] if place.is_file() else map(Path, glob.glob(str(place), recursive=True))
        files = sorted(str(file.absolute()) for file in found if file.is_file())
        if files:
            _known_split(split, ["train"], path, field)  # the library's name for files without names of splits
    if not files:
        raise UsageError(
            f"{field} '{path}' does not exist on this machine, and matches no file as a glob; mplug downloads nothing, "
            f"so set {field} to a local file or folder"
        )
    for file in files:
        if _suffix(file) is None:
            raise UsageError(f"{field}: '{file}' is no file {KINDS}; set {field} to such files, or convert it")
        if not os.access(file, os.R_OK):
            raise UsageError(f"{field}: cannot read '{file}'; make it readable, or remove it")
    return Source(path, tuple(files))


def _suffix(file: str) -> str | None:
    return next((suffix for suffix in BUILDERS if file.endswith(suffix)), None)


def _saved(folder: Path, path: str, split: str, field: str) -> list[str]:
    """The Arrow files of a folder that save_to_disk wrote; none if it is another folder."""
    has_splits = (folder / SAVED_SPLITS).is_file()
    if not has_splits and not all((folder / name).is_file() for name in SAVED):
        return []
    try:
        with Quiet():
            found: Any = datasets.load_from_disk(str(folder.absolute()))
    except Exception as error:
        raise UsageError(f"{field} '{path}' is a damaged data set: {_reason(error)}; copy it again") from None
    if has_splits:
        found = found[_known_split(split, list(found), path, field)]
    return [entry["filename"] for entry in found.cache_files]


def _of_folder(folder: Path, path: str, split: str, field: str) -> list[str]:
    """The files of a folder's split, by the library's rules for names: 'train-00000-of-00002.parquet', 'test/a.jsonl'.

    Without such names, all files are the split 'train'.
    """
    from datasets.data_files import DataFilesList, EmptyDatasetError, get_data_patterns

    base = str(folder.absolute())
    try:
        patterns = get_data_patterns(base)
        found = {name: DataFilesList.from_patterns(parts, base_path=base) for name, parts in patterns.items()}
    except (EmptyDatasetError, FileNotFoundError):
        found = {}
    splits = {str(name): [file for file in files if _is_data(file)] for name, files in found.items()}
    splits = {name: files for name, files in splits.items() if files}
    if not splits:
        raise UsageError(f"{field} '{path}' contains no file {KINDS}; set {field} to a folder of such files")
    return splits[_known_split(split, list(splits), path, field)]


def _is_data(file: str) -> bool:
    return _suffix(file) is not None and Path(file).name not in DESCRIPTIONS


def _known_split(split: str, splits: list[str], path: str, field: str) -> str:
    if split not in splits:
        raise UsageError(
            f"{field} '{path}' has no split '{split}', only {', '.join(sorted(splits))}; set data.split or "
            f"data.validation_split to one of them"
        )
    return split


def open_rows(file: str, cache: Path) -> "IterableDataset | None":
    """The rows of a file as the library streams them, None if it has none; raises UsageError if the file is damaged.

    The library keeps its locks in `cache`.
    """
    builder = BUILDERS[_suffix(file) or ""]
    own = {"parse_agent_traces": False} if builder == "json" else {}
    try:
        with Quiet():
            return datasets.load_dataset(
                builder, data_files=[file], split="train", streaming=True, cache_dir=str(cache / "locks"), **own
            )
    except StopIteration:  # the library's answer to an empty file of JSON lines
        return None
    except Exception as error:
        raise unreadable(file, error) from None


def rows_of(file: str, dataset: "IterableDataset | None") -> Iterator[dict[str, Any]]:
    """The rows of an opened file, from its present state on; raises UsageError where the file is damaged."""
    rows = iter(dataset) if dataset is not None else iter(())
    while True:
        try:
            with Quiet():
                row = next(rows, None)
        except Exception as error:
            raise unreadable(file, error) from None
        if row is None:
            return
        yield row


class Quiet:
    """Silences the library's own messages, whose reasons are in the error, and keeps it from importing torch."""

    def __enter__(self) -> None:
        self._level, self._torch = datasets.logging.get_verbosity(), datasets.config.TORCH_AVAILABLE
        datasets.logging.set_verbosity(logging.CRITICAL)
        datasets.config.TORCH_AVAILABLE = False

    def __exit__(self, *_: object) -> None:
        datasets.logging.set_verbosity(self._level)
        datasets.config.TORCH_AVAILABLE = self._torch


def unreadable(file: str, error: Exception) -> UsageError:
    """The error about a file that the library cannot read."""
    return UsageError(f"cannot read '{file}': {_reason(error)}; correct it, or copy it again")


def _reason(error: BaseException) -> str:
    """The first line of the library's reason."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")
