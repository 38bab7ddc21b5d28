"""Storage for torch.distributed.checkpoint: a folder of safetensors files and a JSON manifest, without pickle."""

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

from mplug.run.launching import launched
from mplug.system.files import sync_path, write_whole
from mplug_saving.boxes import BoxSavePlanner
from mplug_saving.manifest import encode, name_in_file
from mplug_saving.names import MANIFEST, SUFFIX, file_of, partial_path
from mplug_saving.own_folders import add_part, keep_parts, make_partial
from mplug_saving.plans import KeptPlans
from mplug_saving.reading import checksum_of, open_file
from mplug_saving.retention import Retention

log = logging.getLogger("mplug")


@dataclass(frozen=True)
class Written:
    """The file that a rank has written, with its size and checksum."""

    file: str
    size: int
    crc32: int


class FolderWriter(StorageWriter):
    """Writes one file per rank to a temporary folder. The coordinator adds the manifest and makes the folder visible.

    The coordinator also removes old checkpoints. `manifest` is the plain data to save with the tensors, which `plans`
    describe. The coordinator calls `confirm` before it changes a visible checkpoint; it raises if another process has
    taken over the run. Without a `shared` folder, the coordinator may see a part of the files only. A rank with
    `own_folder` does not see its folder, and calls `add_part` with the result of the save.
    """

    def __init__(
        self,
        final: Path,
        rank: int,
        manifest: Mapping[str, Any],
        plans: KeptPlans,
        retention: Retention,
        confirm: Callable[[], None] | None = None,
        shared: bool = True,
        own_folder: bool = False,
    ) -> None:
        self.shared, self.own_folder = shared, own_folder
        self.final, self.partial, self.rank = final, partial_path(final), rank
        self.manifest, self.plans, self.retention, self.confirm = manifest, plans, retention, confirm

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Create the temporary folder, after removing one that a killed run has left."""
        if is_coordinator:
            self._refuse_if_taken_over()
            self.retention.before(self.final)
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)
            sync_path(self.final.parent)
            sync_path(self.final.parent.parent)
        elif self.own_folder:
            make_partial(self.final)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans unchanged."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Write all parts of this rank to its file, which has one result. A rank without a part writes nothing."""
        assert isinstance(planner, BoxSavePlanner)
        future: Future[list[WriteResult]] = Future()
        tensors = {
            name_in_file(name, start): _on_host(part)
            for name, boxed in planner.state.items()
            for start, part in boxed.parts.items()
        }
        written = []
        if tensors:
            path = self.partial / file_of(self.rank)
            save_file(tensors, path)
            sync_path(path)
            size = path.stat().st_size
            written.append(WriteResult(MetadataIndex(path.name), size, Written(path.name, size, crc32(path))))
        future.set_result(written)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the checkpoint visible after all ranks have written their files.

        Without a shared folder, the ranks receive the text of the manifest as `metadata.storage_data`.
        """
        written: list[Written] = [result.storage_data for of_rank in results for result in of_rank]
        here = {one.file for one in written if self.shared or (self.partial / one.file).exists()}
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
            _replace(self.partial, self.final, {old: new for old, new in names.items() if old in here}, text)
        else:
            write_whole(self.partial / MANIFEST, text)
            sync_path(self.partial)
            self.partial.rename(self.final)
            sync_path(self.final.parent)
        self.retention.after(self.final, [names[one] for one in here])
        metadata.storage_data = None if self.shared else text

    def add_part(self, metadata: Metadata) -> None:
        """Make this rank's file visible in the folder of its machine, if that is another one than the coordinator's."""
        if self.own_folder:
            add_part(self.final, self.rank, metadata.storage_data)
            world = launched()
            if world is not None and world.local_rank == 0:
                keep_parts(self.final, self.retention.keep)

    def _refuse_if_taken_over(self) -> None:
        if self.confirm is not None:
            self.confirm()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """False: torch must not select this writer by a path."""
        return False


class FolderReader(StorageReader):
    """Reads the parts of a load plan from the files of a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Nothing: the planner has the index of the checkpoint."""
        return Metadata({})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the reader needs no preparation."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Copy every part to its destination. Each file is opened once."""
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
        """False: torch must not select this reader by a path."""
        return False


# Replacing a checkpoint.


def _unused_names(final: Path, files: Iterable[str]) -> dict[str, str]:
    """For each new file, a name that the folder of the old checkpoint does not have: 'rank00000.2.safetensors'."""
    existing, number = set(os.listdir(final)), 2
    while existing & {_numbered(file, number) for file in files}:
        number += 1
    return {file: _numbered(file, number) for file in files}


def _numbered(file: str, number: int) -> str:
    return f"{file.removesuffix(SUFFIX)}.{number}{SUFFIX}"


def _replace(partial: Path, final: Path, names: Mapping[str, str], manifest: str) -> None:
    """Replace a visible checkpoint: add the new files to its folder, replace its manifest, remove the old files.

    The folder stays visible. One rename replaces the manifest, and a POSIX file system makes it atomic: before it, the
    folder is the old checkpoint, and after it, the new one. If an old file cannot be removed, the function logs it.
    """
    for old, new in names.items():
        (partial / old).rename(final / new)
    sync_path(final)
    write_whole(final / MANIFEST, manifest)
    sync_path(final)
    for path in [*final.iterdir(), partial]:
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
    """The CRC-32 of a file on the disk."""
    with open_file(path.parent, path.name) as file:
        return checksum_of(file)
