"""Save checkpoints, synchronously or while training continues, and load them."""

import shutil
import time
import warnings
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from mplug.errors import RunError, UsageError, listed
from mplug.run.run import Run
from mplug_saving.boxes import Boxed, BoxLoadPlanner, BoxSavePlanner, Start, State
from mplug_saving.folder import complete, read_manifest, verify
from mplug_saving.names import partial_path, path_of
from mplug_saving.opened import Opened
from mplug_saving.plans import KeptPlans
from mplug_saving.rank_exchanges import raise_alike
from mplug_saving.retention import Retention
from mplug_saving.storage import FolderReader, FolderWriter
from mplug_saving.verified import Verified

_UNFINISHED: set["Future[Any]"] = set()
"""The asynchronous saves of this process, also those of an earlier attempt of the run, whose threads still write."""

PATIENCE = 60.0
"""Seconds for which a run waits for them; one that takes longer waits for a process that has died."""


class Saver:
    """Saves a run's checkpoints, one at a time, on all ranks together.

    If a save fails, for example on a full disk, the earlier checkpoints stay unchanged, and every rank raises the same
    RunError. A synchronous save raises it at once. An asynchronous save requests the run to stop, and the next `wait`
    raises the error.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.verified = run, Verified()
        self.retention = Retention(run.config.checkpoint.keep, self.verified)
        self._stager, self._plans = _HostCopy(), KeptPlans()
        self._pending: tuple[FolderWriter, Future[Any]] | None = None
        self._visible: list[Path] = []
        self._longest = 0.0
        self._expected = 0.0
        wait([*_UNFINISHED], PATIENCE)  # it may write to a folder that this run is about to write to
        if run.groups is not None:
            run.groups.beside()  # all ranks must make this group together

    def save(self, state: State, manifest: Mapping[str, Any]) -> None:
        """Save the current step. `state` may change as soon as the method returns, also for an asynchronous save."""
        self.wait()
        run, began = self.run, time.monotonic()
        final = path_of(run.checkpoints, run.step)
        confirm = run.claim.confirm if run.claim is not None else None
        folders = {"shared": run.shared_folder, "own_folder": not run.sees_first_folder}
        writer = FolderWriter(final, run.rank, manifest, self._plans, self.retention, confirm, **folders)
        options = {"storage_writer": writer, "planner": BoxSavePlanner(self._plans), **_together(run)}
        if run.config.checkpoint.asynchronous:
            saving: Any = dcp_async_save(state, async_stager=self._stager, **options)
            _UNFINISHED.add(saving)
            saving.add_done_callback(_UNFINISHED.discard)
        else:
            saving = Future()
            try:
                saving.set_result(dcp_save(state, **options))
            except CheckpointException as error:
                saving.set_exception(error)
        own = weakref.ref(self)  # a thread that outlives its run must not keep the process groups of the run open

        def finished(ended: "Future[Any]") -> None:
            if (saver := own()) is not None:
                saver._finished(ended, began)

        saving.add_done_callback(finished)
        self._pending = (writer, saving)
        if not run.config.checkpoint.asynchronous:
            self.wait()

    def saved(self) -> list[Path]:
        """The checkpoints that have become visible since the last call."""
        if self._pending is not None and self._pending[1].done() and self._pending[1].exception() is None:
            self.wait()
        paths, self._visible = self._visible, []
        return paths

    def expect(self, num_bytes: int) -> None:
        """Set the expected duration of the first save: this rank writes `num_bytes`, at an assumed 100 MB/s."""
        self._expected = num_bytes / 100e6

    def expected_seconds(self) -> float:
        """The expected time in seconds until a save is visible: that of the longest save so far."""
        return self._longest or self._expected

    def wait(self) -> None:
        """Wait until the pending checkpoint is visible. RunError if the save fails."""
        if self._pending is None:
            return
        writer, saving = self._pending
        final = writer.final
        error = saving.exception()
        self._pending = None
        if error is not None:
            if self.run.rank == 0 and (self.run.claim is None or self.run.claim.held()):
                shutil.rmtree(partial_path(final), ignore_errors=True)
            raise RunError(_explained(error, final)) from error
        try:
            writer.add_part(saving.result())
        except OSError as failure:
            raise RunError(_explained(failure, final)) from failure
        self._visible.append(final)

    def forget_layout(self) -> None:
        """The layout of the run has changed: free the buffers of its old parts, and plan the next save anew."""
        self._stager.close()
        self._plans = KeptPlans()

    def let_finish(self) -> None:
        """Wait for the pending save of a run that has failed. Its own error is not reported."""
        if self._pending is not None:
            wait([self._pending[1]])

    def _finished(self, ended: "Future[Any]", began: float) -> None:
        """Record the duration of a save. If the save failed, request the run to stop."""
        self._longest = max(self._longest, time.monotonic() - began)
        if ended.exception() is not None:
            self.run.stop_requested = True


class _HostCopy(AsyncStager):
    """Copies a state to buffers in the host's memory, and reuses the buffers for each save."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, Start], Tensor] = {}

    @property
    def should_synchronize_after_execute(self) -> bool:
        """The copy is complete when `stage` returns."""
        return False

    def stage(self, state_dict: Any) -> Any:
        """A copy of the state in the host's memory."""
        copied = {
            name: Boxed(boxed.shape, {start: self._copied(name, start, part) for start, part in boxed.parts.items()})
            for name, boxed in state_dict.items()
        }
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return copied

    def _copied(self, name: str, start: Start, part: Tensor) -> Tensor:
        buffer = self._buffers.get((name, start))
        if buffer is None or (buffer.shape, buffer.dtype) != (part.shape, part.dtype):
            buffer = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
            self._buffers[name, start] = buffer
        return buffer.copy_(part, non_blocking=True)

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` has completed the copy."""

    def close(self) -> None:
        """Free the buffers."""
        self._buffers.clear()


def load(run: Run, opened: Opened, state: State, verified: Verified | None = None) -> None:
    """Load a checkpoint into the parts of `state`, on all ranks together. Each rank plans its own reads.

    The function does not compare the checksums of files in `verified` again. Raises UsageError if the checkpoint is
    damaged or belongs to another model or optimizer.
    """
    raise_alike(run, _error_of(opened, state, verified or Verified()))
    error = None
    try:
        dcp_load(state, storage_reader=FolderReader(opened.path), planner=BoxLoadPlanner(opened.index), **_alone())
    except CheckpointException as raised:  # derives from BaseException
        ((cause, _),) = raised.failures.values()
        error = RunError(f"cannot read checkpoint '{opened.path}': {cause}")
        error.__cause__ = raised
    raise_alike(run, error)


def _error_of(opened: Opened, state: State, verified: Verified) -> UsageError | RunError | None:
    """The reason why this rank cannot load a checkpoint, or None. Each rank verifies its share of the files."""
    try:
        refuse_another(opened.path, opened.index.shapes, state)
        verify(opened.path, opened.share, verified.unverified(opened.path, opened.share["files"]))
    except (UsageError, RunError) as error:
        return error
    return None


def refuse_another(path: Path, saved: Mapping[str, tuple[int, ...]], state: State) -> None:
    """Raise UsageError if a checkpoint lacks a tensor of `state`, or has it with another shape. Reads no tensor.

    `saved` are the shapes of the checkpoint's tensors.
    """
    for name, boxed in state.items():
        parameter, _, tensor = name.rpartition("/")
        if tensor == "buffer" and name not in saved:
            raise UsageError(
                f"checkpoint '{path}' has no state '{parameter}', which the model or a kernel of this run keeps; "
                f"resume with the config of the checkpoint, or start a new run with its weights: mplug train --set "
                f"checkpoint.pretrained={path}"
            )
        if tensor != "buffer" and f"{parameter}/weight" not in saved:
            raise UsageError(
                f"checkpoint '{path}' has no parameter '{parameter}', which the model has; resume with the config of "
                f"the checkpoint"
            )
        if name not in saved and tensor != "buffer" and _was_frozen(parameter, tensor, saved):
            raise UsageError(
                f"checkpoint '{path}' has no optimizer state '{tensor}' of '{parameter}', because the parameter was "
                f"frozen in that run; add it to model.frozen, or start a new run with the weights of the checkpoint: "
                f"mplug train --set checkpoint.pretrained={path}"
            )
        if name not in saved:
            states = sorted({key.rpartition("/")[2] for key in saved if key.startswith(f"{parameter}/")} - {"weight"})
            raise UsageError(
                f"checkpoint '{path}' has no optimizer state '{tensor}' of '{parameter}' (it has {listed(states)}), "
                f"because another optimizer saved it; resume with that optimizer, or start a new run with the weights "
                f"of the checkpoint: mplug train --set checkpoint.pretrained={path}"
            )
        is_state = tensor not in ("weight", "buffer")
        if is_state and saved[name] != boxed.shape and _of_workers(saved[name], boxed.shape):
            raise UsageError(
                f"checkpoint '{path}' has the state '{tensor}' of '{parameter}' with shape {saved[name]}, but the run "
                f"has {boxed.shape}: workers that train independently have a state each; resume with as many, or start "
                f"a new run with the weights of the checkpoint: mplug train --set checkpoint.pretrained={path}"
            )
        if saved[name] != boxed.shape:
            raise UsageError(
                f"checkpoint '{path}' has '{parameter}' with shape {saved[name]}, but the model has "
                f"{boxed.shape}; resume with the config of the checkpoint"
            )


def _of_workers(saved: tuple[int, ...], own: tuple[int, ...]) -> bool:
    """Whether two shapes of a state differ in a first dimension over independent workers, or one of them lacks it."""
    return saved[1:] in (own, own[1:]) or saved == own[1:]


def _was_frozen(parameter: str, state: str, saved: Iterable[str]) -> bool:
    """Whether a checkpoint has `state` for other parameters, but only the weight of this one."""
    own = {name for name in saved if name.startswith(f"{parameter}/")}
    return own == {f"{parameter}/weight"} and any(name.endswith(f"/{state}") and name[0] != "/" for name in saved)


def _together(run: Run) -> dict[str, Any]:
    """Arguments that give torch.distributed.checkpoint the process group; a run of one process has none."""
    if run.groups is not None:
        return {"process_group": run.groups.beside()}
    return _alone()


def _alone() -> dict[str, Any]:
    """Arguments that make torch.distributed.checkpoint plan for this process alone, without its warning about that."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
    return {"no_dist": True}


def _explained(error: BaseException, final: Path) -> str:
    failures = error.failures if isinstance(error, CheckpointException) else {0: (error, None)}
    rank, (cause, _) = min(failures.items())
    full = "os error 28" in str(cause) or getattr(cause, "errno", None) == 28
    where = f" on rank {rank}" if len(failures) > 1 or rank > 0 else ""
    earlier = _intact_before(final)
    intact = f"; the earlier checkpoint '{earlier}' is intact" if earlier is not None else ""
    reason = "no space left on the device" if full else str(cause)
    return f"cannot save the checkpoint '{final}'{where}: {reason}{intact}"


def _intact_before(final: Path) -> Path | None:
    """The newest other checkpoint whose manifest is valid and whose files have the sizes that it states, or None."""
    for path in reversed(complete(final.parent)):
        if path == final:
            continue
        try:
            read_manifest(path)
        except (UsageError, RunError):
            continue
        return path
    return None
