"""A checkpoint's folder as torch.distributed.checkpoint writes and reads it: safetensors and JSON, nothing pickled."""

import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from mplug.checkpoint.boxes import BoxSavePlanner
from mplug.checkpoint.manifest import encode, name_in_file
from mplug.checkpoint.names import MANIFEST, SUFFIX, aside_of, file_of
from mplug.checkpoint.plans import KeptPlans
from mplug.checkpoint.reading import checksum_of, open_file
from mplug.checkpoint.retention import Retention, sync
from mplug.files import write_whole

log = logging.getLogger("mplug")


@dataclass(frozen=True)
class Written:
    """What a rank has written: its file, the file's size and checksum."""

    file: str
    size: int
    crc32: int


class FolderWriter(StorageWriter):
    """Writes a file a rank aside; the coordinator adds the manifest, makes both visible, and removes old checkpoints.

    `manifest` is the plain data to keep beside the tensors, and `plans` describe the tensors. `confirm` raises if
    another process has taken the run over: the coordinator calls it before it changes anything.
    """

    def __init__(
        self,
        final: Path,
        rank: int,
        manifest: Mapping[str, Any],
        plans: KeptPlans,
        retention: Retention,
        confirm: Callable[[], None] | None = None,
    ) -> None:
        self.final, self.aside, self.rank = final, aside_of(final), rank
        self.manifest, self.plans, self.retention, self.confirm = manifest, plans, retention, confirm

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the folder aside, and remove what a killed run has left there."""
        if is_coordinator:
            self._refuse_if_taken_over()
            self.retention.before(self.final)
            shutil.rmtree(self.aside, ignore_errors=True)
            self.aside.mkdir(parents=True)
            sync(self.final.parent)
            sync(self.final.parent.parent)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Nothing to add."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Write all parts of this rank to its file; the result is one per file, and none of a replica of others."""
        assert isinstance(planner, BoxSavePlanner)
        future: Future[list[WriteResult]] = Future()
        tensors = {
            name_in_file(name, start): _on_host(part)
            for name, boxed in planner.state.items()
            for start, part in boxed.parts.items()
        }
        written = []
        if tensors:
            path = self.aside / file_of(self.rank)
            save_file(tensors, path)
            sync(path)
            size = path.stat().st_size
            written.append(WriteResult(MetadataIndex(path.name), size, Written(path.name, size, crc32(path))))
        future.set_result(written)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the checkpoint visible, once all ranks have written."""
        written: list[Written] = [result.storage_data for of_rank in results for result in of_rank]
        names = {one.file: one.file for one in written}
        table = self.plans.table()
        replaces = self.final.is_dir() and not self.final.is_symlink()
        if replaces:
            names = _unused_names(self.final, names)
            table = self.plans.table(names.__getitem__)
        files = {names[one.file]: {"bytes": one.size, "crc32": one.crc32} for one in written}
        text = encode({**self.manifest, "files": files}, table)
        self._refuse_if_taken_over()
        if replaces:
            _replace(self.aside, self.final, names, text)
        else:
            write_whole(self.aside / MANIFEST, text)
            sync(self.aside)
            self.aside.rename(self.final)
            sync(self.final.parent)
        self.retention.after(self.final, files)

    def _refuse_if_taken_over(self) -> None:
        if self.confirm is not None:
            self.confirm()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """Nothing chooses this writer by a path."""
        return False


class FolderReader(StorageReader):
    """Reads the parts that a plan asks for out of the ranks' files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A reader reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Nothing: the planner has the index of the checkpoint."""
        return Metadata({})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Copy every part into its place; a file is opened once."""
        by_file = defaultdict(list)
        for item in plan.items:
            by_file[plan.planner_data[item.storage_index]].append(item)
        for file, items in by_file.items():
            with safetensors.safe_open(self.path / file, framework="pt") as opened:
                for item in items:
                    where = zip(item.storage_offsets, item.lengths, strict=True)
                    target = planner.resolve_tensor(item)
                    stored, parts = key_of(item.storage_index), tuple(slice(s, s + n) for s, n in where)
                    target.copy_(opened.get_slice(stored)[parts] if parts else opened.get_tensor(stored))
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def whole(self, name: str, file: str, start: Sequence[int]) -> Tensor:
        """A chunk of a tensor."""
        with safetensors.safe_open(self.path / file, framework="pt") as opened:
            found: Tensor = opened.get_tensor(name_in_file(name, start))
        return found

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """Nothing chooses this reader by a path."""
        return False


# Replacing a checkpoint.


def _unused_names(final: Path, files: Iterable[str]) -> dict[str, str]:
    """For each of a new checkpoint's files, a name that the old one does not have: 'rank00000.2.safetensors'."""
    taken, number = set(os.listdir(final)), 2
    while taken & {_numbered(file, number) for file in files}:
        number += 1
    return {file: _numbered(file, number) for file in files}


def _numbered(file: str, number: int) -> str:
    return f"{file.removesuffix(SUFFIX)}.{number}{SUFFIX}"


def _replace(aside: Path, final: Path, names: Mapping[str, str], manifest: str) -> None:
    """Put new files into a checkpoint's folder, then its new manifest in the place of the old, then remove old files.

    The folder is visible all the while. Its manifest is replaced by one rename, which every POSIX file system has, so
    it is the old checkpoint before that and the new one after it. An old file that cannot be removed then is logged.
    """
    for old, new in names.items():
        (aside / old).rename(final / new)
    sync(final)
    write_whole(final / MANIFEST, manifest)
    sync(final)
    for path in [*final.iterdir(), aside]:
        if path.name != MANIFEST and path.name not in names.values():
            try:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            except OSError as error:
                log.warning("cannot remove '%s': %s", path, error)


def key_of(index: MetadataIndex) -> str:
    """The name of a part in its file: 'blocks.0.mlp.up.weight/exp_avg@0,128'."""
    return name_in_file(index.fqn, index.offset or ())


def _on_host(part: Any) -> Tensor:
    assert isinstance(part, Tensor)
    return part.detach().cpu().contiguous()


def crc32(path: Path) -> int:
    """The checksum of a file that has just been written."""
    with open_file(path.parent, path.name) as file:
        return checksum_of(file)
