"""The plugin: copies every checkpoint of a run to a store."""

import json
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from mplug import Activity, UsageError, hookimpl, write_whole

if TYPE_CHECKING:
    from mplug import Run
    from mplug_store.address import Store
    from mplug_store.joined import Joined
    from mplug_store.worker import Worker


class CopiesCheckpoints:
    """Copies every checkpoint of a run to a store while training continues.

    A thread of each rank copies the rank's share of the files, and rank 0 writes the manifest when all files are
    there. A store that refuses the run at its start ends it; later, the run reports the failure and continues. With
    `own_disks`, the store also joins the checkpoints of machines that have no common folder.
    """

    class Config(BaseModel):
        """Where to copy, and how long to wait."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        address: str = Field(
            min_length=1, description="folder of the copies, s3://BUCKET/FOLDER; that of a run has the run's name"
        )
        own_disks: bool = Field(
            False,
            description="the machines need no common folder for the run: the store joins the parts of its checkpoints",
        )
        keep: PositiveInt | None = Field(
            None, description="number of checkpoints to keep in the store; null: checkpoint.keep"
        )
        wait_seconds: PositiveFloat = Field(
            600, description="maximum seconds that rank 0 waits for another file of the other ranks"
        )
        end_seconds: PositiveFloat = Field(
            3600, description="maximum seconds that the end of a run waits for its last copy"
        )

    def __init__(self, config: Config) -> None:
        self.config = config
        self.worker: Worker | None = None

    @hookimpl
    def configure(self) -> None:
        """Refuse an address without a protocol, or with one whose library is not installed."""
        from mplug_store.address import refuse_unusable  # imports fsspec

        refuse_unusable(self.config.address, "extensions.store.address")

    @hookimpl
    def gather_checkpoints(self) -> "Joined | None":
        """The store, if the machines may have folders of their own."""
        if not self.config.own_disks:
            return None
        from mplug_store.joined import Joined  # imports fsspec

        return Joined(self.config.address)

    @hookimpl
    def run_started(self, run: "Run") -> None:
        """Refuse a store that does not answer, or that has another run; copy the checkpoint that the run resumes."""
        if run.directory is None:
            return
        from mplug_store.address import Store, StoreError  # imports fsspec
        from mplug_store.worker import Worker

        try:
            store = Store(f"{self.config.address.rstrip('/')}/{run.directory.name}")
            if run.rank == 0:
                refuse_other_run(store, run.directory, "extensions.store.address")
        except StoreError as error:
            raise UsageError(f"extensions.store.address: {error}; use another address, or remove it") from error
        keep = self.config.keep or run.config.checkpoint.keep
        self.worker = Worker(store, run.directory, run.rank, keep, self.config.wait_seconds)
        resumed = run.directory / "checkpoints" / f"step_{run.step:08d}"
        if run.step and resumed.is_dir():
            self._add(run, resumed, newest=False)

    @hookimpl
    def checkpoint_saved(self, run: "Run", path: Path) -> None:
        """Hand the checkpoint to the thread. Waits if the store is slower than the saves."""
        self._add(run, path, newest=True)

    @hookimpl
    def run_finished(self, run: "Run") -> None:
        """Wait until the last checkpoint is in the store."""
        worker, self.worker = self.worker, None
        if worker is not None:
            run.enter(Activity.WRITING)
            worker.end(self.config.end_seconds)

    def _add(self, run: "Run", path: Path, newest: bool) -> None:
        from mplug_store.upload import Copy, all_files, own_files  # imports fsspec

        if self.worker is not None:
            share = all_files(run.rank, run.mesh.world_size) if run.shared_folder else own_files(run.rank)
            self.worker.add(Copy(path, share), newest)


def refuse_other_run(store: "Store", directory: Path, field: str) -> None:
    """Raise UsageError if the folder in the store belongs to another run; claim it if it belongs to none.

    `field` is where the user has set the address.
    """
    from mplug_store.checkpoints import IDENTITY  # imports fsspec

    path, found = directory / IDENTITY, store.read(IDENTITY)
    if not path.exists():
        write_whole(path, json.dumps({"run": uuid.uuid4().hex}) + "\n")
    own = path.read_bytes()
    if found is None:
        store.write_whole(IDENTITY, own)
    elif found != own:
        raise UsageError(
            f"{field}: '{store.address}' has the checkpoints of another run; use another address or "
            f"--name, or continue that run: mplug store pull {store.address}"
        )
