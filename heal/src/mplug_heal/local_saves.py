"""Save a run on the local disks of its machines while it trains, and continue it from there.

A save is a copy of the state in memory, as `copies` makes it: of what the rank owns, and of what another rank owns
whose copy it keeps. A thread writes both to the disk. The ranks agree on the outcome at the next save, because the
thread takes part in no collective; until then, the local checkpoint before stays. A local checkpoint needs no mark of
its own: it is complete if the disks of all machines together have all of its parts.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import torch

from mplug.errors import UsageError
from mplug.run.run import Run
from mplug.system.files import write_whole
from mplug.training.save_times import EverySteps, SaveTimes
from mplug_heal.live_state import LiveState, capture
from mplug_heal.local_config import LocalConfig
from mplug_heal.local_files import Key, Part, remove_others, remove_parts, write_part
from mplug_heal.local_reads import continued
from mplug_heal.machines import Place, expanded, keepers, place_of_process, refusal
from mplug_heal.parts import copied, second_copies
from mplug_heal.save_times import OptimalSaves
from mplug_heal.saying import say
from mplug_saving.boxes import State
from mplug_saving.names import ELSEWHERE
from mplug_saving.position import Position
from mplug_saving.rank_exchanges import from_rank

log = logging.getLogger("mplug")

SECTION = "extensions.local_checkpoints"
PATIENCE = 60.0
"""Seconds for which a run waits for what an earlier attempt of it still writes."""
SPEED = 1e9
"""Assumed bytes per second of a local disk, until the first save has measured it."""
_UNFINISHED: set["_Writing"] = set()


class _Writing(threading.Thread):
    """Writes parts to the disk."""

    def __init__(self, key: Key, folder: Path, parts: Mapping[int, Part]) -> None:
        super().__init__(name="local checkpoint")
        self.key, self.error, self.seconds = key, "", 0.0
        self._folder, self._parts = folder, parts
        _UNFINISHED.add(self)
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        try:
            for rank, part in self._parts.items():
                write_part(self._folder, rank, part)
        except Exception as error:  # what is not known to be written counts as failed
            full = "os error 28" in str(error) or getattr(error, "errno", None) == 28
            self.error = "no space left on the device" if full else str(error) or type(error).__name__
            log.warning("cannot save the local checkpoint '%s': %s", self._folder, self.error)
            remove_parts(self._folder, self._parts)
        finally:
            self.seconds = time.monotonic() - began
            _UNFINISHED.discard(self)


class LocalSaves:
    """The local checkpoints of one attempt of a run, on all ranks together."""

    def __init__(self, run: Run, config: LocalConfig) -> None:
        """Meet the other ranks. UsageError on all if the local folder of one cannot be used."""
        for writing in [*_UNFINISHED]:
            writing.join(PATIENCE)
        self._config, self._base = config, Path(expanded(config.folder))
        self._places: list[Place] = run.gathered(place_of_process(config.folder, config.machine))
        if reason := refusal(self._places, config.folder):
            raise UsageError(f"{SECTION}: {reason}")
        self._keepers = keepers([place.machine for place in self._places]) if config.peer is not False else {}
        self._refuse_or_state_one_machine(run)
        disks = [place.disk for place in self._places]
        self._removes = disks.index(disks[run.rank]) == run.rank
        every = config.every
        self._times: SaveTimes = EverySteps(every) if every != "auto" else OptimalSaves(what="local checkpoint")
        self._began: int | None = None
        self._root: Path | None = None
        self._complete: list[Key] = []
        self._writing: _Writing | None = None
        self._longest = 0.0
        self._buffers: dict[int, State] = {}
        self._parts: Callable[[], object] = lambda: None
        self._known: LiveState | None = None
        self._is_stated = False

    def restore(self, run: Run, position: Position, newest: Path | None, allowed: tuple[str, ...]) -> str | None:
        """Continue after the newest local checkpoint that is not older than `newest`: its origin. Collective.

        None if there is no such local checkpoint.
        """
        self._root = self._folder_of(run)
        if self._root is None:
            return None
        found = continued(run, position, self._root, self._places, newest, allowed)
        if found is None:
            if newest is None and run.rank == 0:
                sentence = "no local checkpoint is complete, and the run has no other one, so it begins anew"
                say(run, sentence)
            return None
        key, source = found
        self._complete = [key]
        if self._removes:  # what a killed save has left would take room from the next one
            remove_others(self._root, self._complete)
        return source

    def is_due(self, run: Run) -> bool:
        """Whether to save this step."""
        if self._began is None or self._began == run.step:  # no step has run: there is nothing to measure, or to save
            self._began = run.step
            return False
        return self._times.is_due(run)

    def save(self, run: Run, position: Position) -> None:
        """Copy the state after this step, and write it while training continues. Collective."""
        began = time.monotonic()
        self._settle(run)
        root = self._root = self._root or self._new_folder(run)
        if self._parts() is not position.parts:  # the layout has changed while the run trains
            self._known, self._parts, self._buffers = None, weakref.ref(position.parts), {}
        live = capture(run, position, self._known)
        self._known = replace(live, own={})
        states = {run.rank: copied(live.own, self._buffers.get(run.rank, {}))}
        if self._keepers:
            kept = [rank for rank, keeper in self._keepers.items() if keeper == run.rank]
            states |= second_copies(run, position, live, kept, self._buffers)
        if run.device.startswith("cuda"):
            torch.cuda.synchronize()
        self._buffers = states
        size, facts = run.mesh.world_size, position.facts()
        parts = {rank: Part(size, state) for rank, state in states.items()}
        if 0 in parts:
            parts[0] = Part(size, states[0], facts, live.plain)
        key = Key(run.step, from_rank(run, 0, uuid4().hex[:12]))
        self._writing = _Writing(key, key.folder(root), parts)
        if not run.config.checkpoint.asynchronous:
            self._settle(run)
        self._state(run)
        expected = self._longest or sum(_num_bytes(state) for state in states.values()) / SPEED
        self._times.saved(run, time.monotonic() - began, expected)

    def _settle(self, run: Run) -> None:
        """Wait for the last save, agree on its outcome, and remove what it replaces. Collective."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.join()
        self._longest = max(self._longest, writing.seconds)
        assert self._root is not None
        has_failed = bool(run.largest(torch.tensor(float(bool(writing.error)), device=run.device)) > 0)
        if not has_failed:
            self._complete = [*self._complete, writing.key][-self._config.keep :]
        if self._removes:
            remove_others(self._root, self._complete)
        errors = run.gathered(writing.error) if has_failed else []
        if errors and run.rank == 0:
            self._report_failure(run, writing.key, errors)

    def _report_failure(self, run: Run, key: Key, errors: list[str]) -> None:
        rank = next(rank for rank, error in enumerate(errors) if error)
        earlier = f"that of step {self._complete[-1].step} stays" if self._complete else "there is no earlier one"
        sentence = (
            f"cannot save the local checkpoint of step {key.step} on rank {rank}, on {self._places[rank].host}, in "
            f"'{self._config.folder}': {errors[rank]}; {earlier}, and training continues"
        )
        say(run, sentence, logging.WARNING)

    def finish(self, run: Run) -> None:
        """Wait for the last save. After the last step of the run, remove what the run has saved."""
        if (writing := self._writing) is not None:
            writing.join()
        if run.step < run.config.trainer.steps or self._root is None:
            return
        if writing is not None:  # other ranks may still write their parts of it
            ranks = [run.rank, *(rank for rank, keeper in self._keepers.items() if keeper == run.rank)]
            remove_parts(writing.key.folder(self._root), ranks)
        if self._removes:
            remove_others(self._root, [writing.key] if writing is not None else [])
        with suppress(OSError):  # another rank of this machine has its parts there
            self._root.rmdir()

    def _refuse_or_state_one_machine(self, run: Run) -> None:
        if self._keepers or self._config.peer is False:
            return
        what = f"all {run.mesh.world_size} processes run" if run.mesh.world_size > 1 else "the run's process runs"
        if self._config.peer:
            raise UsageError(f"{SECTION}.peer=true: {what} on one machine, so none can keep a copy; leave it out")
        if run.rank == 0:
            sentence = (
                f"{what} on one machine, so local checkpoints have no copy on another one: they outlive the processes, "
                f"but not the machine"
            )
            say(run, sentence)

    def _state(self, run: Run) -> None:
        """Say once what a failure loses, if the interval is fixed; a measured one says it itself."""
        every = self._config.every
        if every == "auto" or self._is_stated or run.rank:
            return
        self._is_stated = True
        lost = f"a failure repeats at most {every} of them, or {2 * every} while one is being written"
        say(run, f"a local checkpoint follows every {every} steps: {lost}")

    def _folder_of(self, run: Run) -> Path | None:
        """The folder of the run's local checkpoints on this machine; None if it has saved none.

        Its name is in the folder of the run: another run may have had the same name.
        """
        assert run.directory is not None
        path, name = run.directory / ELSEWHERE, ""
        if run.rank == 0 and path.is_file():
            name = path.read_text().strip()
        name = from_rank(run, 0, name)
        # a copy of the folder of a run has another name: it is another run
        return self._base / name if name.rpartition("-")[0] == run.directory.name else None

    def _new_folder(self, run: Run) -> Path:
        assert run.directory is not None
        name = from_rank(run, 0, f"{run.directory.name}-{uuid4().hex}")
        if run.rank == 0:
            write_whole(run.directory / ELSEWHERE, name)
        return self._base / name


def _num_bytes(state: State) -> int:
    return sum(part.nbytes for boxed in state.values() for part in boxed.parts.values())
