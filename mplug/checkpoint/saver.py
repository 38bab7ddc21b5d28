"""Saving, while training waits or while it goes on; and loading."""

import shutil
import time
import warnings
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

from mplug.checkpoint.boxes import Boxed, BoxLoadPlanner, BoxSavePlanner, Start, State
from mplug.checkpoint.folder import complete, read_manifest, verify
from mplug.checkpoint.names import aside_of, path_of
from mplug.checkpoint.opened import Opened
from mplug.checkpoint.plans import KeptPlans
from mplug.checkpoint.retention import Retention
from mplug.checkpoint.storage import FolderReader, FolderWriter
from mplug.checkpoint.together import raise_alike
from mplug.checkpoint.verified import Verified
from mplug.errors import RunError, UsageError, listed
from mplug.run.run import Run


class Saver:
    """Saves a run's checkpoints, one at a time, on all ranks together.

    A full disk leaves the earlier checkpoints as they were. It raises RunError, the same on every rank: at once, or,
    where training goes on meanwhile, at the next `wait`; until then it asks the run to stop.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.verified = run, Verified()
        self.retention = Retention(run.config.checkpoint.keep, self.verified)
        self._stager, self._plans = _HostCopy(), KeptPlans()
        self._pending: tuple[Path, Future[Any]] | None = None
        self._visible: list[Path] = []
        self._longest = 0.0
        self._expected = 0.0
        if run.groups is not None:
            run.groups.beside()  # made by all ranks together

    def save(self, state: State, manifest: Mapping[str, Any]) -> None:
        """Save the current step; where that goes on beside the training, `state` may change once this returns."""
        self.wait()
        run, began = self.run, time.monotonic()
        final = path_of(run.checkpoints, run.step)
        confirm = run.claim.confirm if run.claim is not None else None
        writer = FolderWriter(final, run.rank, manifest, self._plans, self.retention, confirm)
        options = {"storage_writer": writer, "planner": BoxSavePlanner(self._plans), **_together(run)}
        if run.config.checkpoint.asynchronous:
            saving: Any = dcp_async_save(state, async_stager=self._stager, **options)
        else:
            saving = Future()
            try:
                saving.set_result(dcp_save(state, **options))
            except CheckpointException as error:
                saving.set_exception(error)
        saving.add_done_callback(lambda ended: self._note(ended, began))
        self._pending = (final, saving)
        if not run.config.checkpoint.asynchronous:
            self.wait()

    def saved(self) -> list[Path]:
        """The checkpoints that have become visible since this was last asked."""
        if self._pending is not None and self._pending[1].done() and self._pending[1].exception() is None:
            self.wait()
        found, self._visible = self._visible, []
        return found

    def expect(self, num_bytes: int) -> None:
        """Before the first save: this rank will write so many bytes, at 100 MB/s."""
        self._expected = num_bytes / 100e6

    def expected_seconds(self) -> float:
        """How long a save may take until it is visible: as the longest so far."""
        return self._longest or self._expected

    def wait(self) -> None:
        """Wait until what is being saved is visible; RunError where that fails."""
        if self._pending is None:
            return
        final, saving = self._pending
        error = saving.exception()
        self._pending = None
        if error is not None:
            if self.run.rank == 0 and (self.run.claim is None or self.run.claim.held()):
                shutil.rmtree(aside_of(final), ignore_errors=True)
            raise RunError(_explained(error, final)) from error
        self._visible.append(final)

    def let_finish(self) -> None:
        """Wait until what is being saved is visible, or has failed, which is not told: the run has failed already."""
        if self._pending is not None:
            wait([self._pending[1]])

    def _note(self, ended: "Future[Any]", began: float) -> None:
        """Keep how long it took, and ask the run to stop where it failed."""
        self._longest = max(self._longest, time.monotonic() - began)
        if ended.exception() is not None:
            self.run.stop_requested = True


class _HostCopy(AsyncStager):
    """Copies a state to buffers in the host's memory, which it keeps from one save to the next."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, Start], Tensor] = {}

    @property
    def should_synchronize_after_execute(self) -> bool:
        """The copy is complete when `stage` returns."""
        return False

    def stage(self, state_dict: Any) -> Any:
        """The same state in the host's memory."""
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
        """Nothing is under way."""

    def close(self) -> None:
        """Give the buffers back."""
        self._buffers.clear()


def load(run: Run, opened: Opened, state: State, verified: Verified | None = None) -> None:
    """Fill the parts of `state` on all ranks together; UsageError where the checkpoint is damaged or another's.

    Files in `verified` are not read to compare their checksums. Each rank plans its reads alone, from the index.
    """
    raise_alike(run, _fault(opened, state, verified or Verified()))
    error = None
    try:
        dcp_load(state, storage_reader=FolderReader(opened.path), planner=BoxLoadPlanner(opened.index), **_alone())
    except CheckpointException as raised:  # derives from BaseException
        ((cause, _),) = raised.failures.values()
        error = RunError(f"cannot read checkpoint '{opened.path}': {cause}")
        error.__cause__ = raised
    raise_alike(run, error)


def _fault(opened: Opened, state: State, verified: Verified) -> UsageError | RunError | None:
    """Why this rank cannot load a checkpoint; of the files, each rank reads its share."""
    try:
        refuse_another(opened.path, opened.index.shapes, state)
        verify(opened.path, opened.share, verified.unknown(opened.path, opened.share["files"]))
    except (UsageError, RunError) as error:
        return error
    return None


def refuse_another(path: Path, saved: Mapping[str, tuple[int, ...]], state: State) -> None:
    """Raise UsageError where a checkpoint lacks a tensor of `state`, or has it in another shape; reads no tensor.

    `saved` are the shapes of the checkpoint's tensors.
    """
    for name, boxed in state.items():
        parameter, _, tensor = name.rpartition("/")
        if tensor == "buffer" and name not in saved:
            raise UsageError(f"checkpoint '{path}' has no state '{parameter}'; it is of a model without it")
        if tensor != "buffer" and f"{parameter}/weight" not in saved:
            raise UsageError(f"checkpoint '{path}' has no parameter '{parameter}'; it is of another model")
        if name not in saved and tensor != "buffer" and _was_frozen(parameter, tensor, saved):
            raise UsageError(
                f"checkpoint '{path}' has no '{tensor}' of '{parameter}', which was frozen when it was saved; freeze "
                f"it (model.frozen), or begin a new run with the checkpoint's weights (checkpoint.pretrained)"
            )
        if name not in saved:
            kept = sorted({one.rpartition("/")[2] for one in saved if one.startswith(f"{parameter}/")} - {"weight"})
            raise UsageError(
                f"checkpoint '{path}' has no optimizer state '{tensor}' of '{parameter}' (it has {listed(kept)}): its "
                f"optimizer was another one; resume with that, or begin a new run with its weights: "
                f"mplug train --set checkpoint.pretrained={path}"
            )
        if saved[name] != boxed.shape:
            raise UsageError(
                f"checkpoint '{path}' holds '{parameter}' with shape {saved[name]}, and the model has "
                f"{boxed.shape}; resume with the config that it was saved under"
            )


def _was_frozen(parameter: str, state: str, saved: Iterable[str]) -> bool:
    """Whether a checkpoint has a state of other parameters, and of this one nothing but the weight."""
    own = {name for name in saved if name.startswith(f"{parameter}/")}
    return own == {f"{parameter}/weight"} and any(name.endswith(f"/{state}") and name[0] != "/" for name in saved)


def _together(run: Run) -> dict[str, Any]:
    """How torch.distributed.checkpoint reaches the other ranks; of a run without any, it need not warn."""
    if run.groups is not None:
        return {"process_group": run.groups.beside()}
    return _alone()


def _alone() -> dict[str, Any]:
    """How torch.distributed.checkpoint plans without other ranks; of that it need not warn."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
    return {"no_dist": True}


def _explained(error: BaseException, final: Path) -> str:
    failures = error.failures if isinstance(error, CheckpointException) else {0: (error, None)}
    rank, (cause, _) = min(failures.items())
    full = "os error 28" in str(cause) or getattr(cause, "errno", None) == 28
    where = f" on rank {rank}" if len(failures) > 1 or rank > 0 else ""
    earlier = _intact_before(final)
    survivor = f"; the earlier checkpoint '{earlier}' is intact" if earlier is not None else ""
    reason = "no space left on the device" if full else str(cause)
    return f"cannot save the checkpoint '{final}'{where}: {reason}{survivor}"


def _intact_before(final: Path) -> Path | None:
    """The newest other checkpoint whose manifest is valid and whose files have the right sizes."""
    for path in reversed(complete(final.parent)):
        if path == final:
            continue
        try:
            read_manifest(path)
        except (UsageError, RunError):
            continue
        return path
    return None
