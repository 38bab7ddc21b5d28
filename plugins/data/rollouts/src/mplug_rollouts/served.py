"""A server as the sampler of a run: which ranks ask it, and how it gets the weights that the run trains."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

from mplug import RunError, UsageError
from mplug_pretrained import format_named
from mplug_rollouts.server import Client, Want
from mplug_sampling import prompt_shard
from mplug_saving.names import step_of

if TYPE_CHECKING:
    from mplug import Run, RunConfig
    from mplug_rollouts.config import ServerConfig
    from mplug_sampling import Completion

FOLDER = "served"
PATIENCE = 10.0
"""Seconds in which an export may end by itself before it is killed."""
PAUSE = 0.2
"""Seconds between two looks at the export of the last checkpoint."""
log = logging.getLogger("mplug.rollouts")


def refuse_unpublished(config: "RunConfig", form: str) -> None:
    """Raise UsageError if a format has no form for the model of a run, so that no server could load its exports."""
    try:
        found, reason = format_named(form).ask("form_of", config), "it writes no models of this family"
    except UsageError as error:
        found, reason = None, str(error)
    if found is None:
        raise UsageError(
            f"data.server.weights=checkpoints exports checkpoints by '{form}', which refuses this run: {reason}; "
            f"choose another data.server.format, or set data.server.weights=stale"
        )


class ServedSampler:
    """Completes prompts by a server. `step` is that of the weights which the server has, as far as the run knows."""

    def __init__(self, run: "Run", config: "ServerConfig") -> None:
        self.run, self.config, self.client = run, config, Client(config)
        self.step = 0
        self.exports: Exports | None = None

    def complete(self, tokens: Sequence[Sequence[int]], keys: Sequence[int], want: Want) -> "list[Completion]":
        """The completions of this rank's prompts; the first rank of those with the same prompts asks. Collective."""
        mesh = self.run.mesh
        shards = [prompt_shard(mesh, rank)[0] for rank in range(mesh.world_size)]
        part, answer = shards[self.run.rank], None
        self._update()
        if shards.index(part) == self.run.rank:
            try:
                answer = self.client.complete(tokens, keys, want)
            except (UsageError, RunError) as error:
                answer = error
        answers = self.run.gathered(answer)
        self._raise(answers)
        found: list[Completion] = answers[shards.index(part)]
        return found

    def saved(self, path: Path) -> None:
        """A checkpoint is complete: its weights are for the server."""
        if self.config.weights != "checkpoints" or self.run.rank != 0 or self.run.directory is None:
            return
        if self.exports is None:
            self.exports = Exports(self.run.directory, self.config.format)
        self.exports.add(step_of(path))

    def finish(self) -> None:
        """The run has done all its steps: wait until the server has the weights of the last checkpoint.

        A request to stop ends the wait. The run is done, so a failure is only reported.
        """
        if self.exports is None or self.step >= self.exports.newest:
            return
        last, beginning = self.exports.newest, f"the server has the weights of step {self.step}"
        self._say(f"waiting for the export of step {last}, whose weights the server loads; Ctrl-C ends the wait")
        try:
            while self.step < last and not self.run.stop_requested:
                self._hand_over()
                time.sleep(PAUSE)
        except (UsageError, RunError) as error:
            self._say(f"{beginning}, and not those of step {last}: {error}")
            return
        if self.step < last:
            self._say(f"{beginning}, and not those of step {last}, because the run was asked to stop")

    @staticmethod
    def _say(line: str) -> None:
        log.warning("%s", line)
        print(f"mplug: {line}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End an export that is under way."""
        if self.exports is not None:
            self.exports.close()

    def _update(self) -> None:
        """Let the server load the newest weights before any rank asks it; all ranks know their step. Collective."""
        answer: Any = None
        try:
            if self.run.rank == 0:
                self._hand_over()
            answer = self.step
        except (UsageError, RunError) as error:
            answer = error
        answers = self.run.gathered(answer)
        self._raise(answers)
        self.step = max(answers)  # another rank may be the first one after a rank has died

    def _hand_over(self) -> None:
        """Let the server load the newest export, if one is complete."""
        found = None if self.exports is None else self.exports.finished()
        if found is not None:
            step, folder = found
            self.client.load(folder)
            log.info("the server has the weights of step %d", step)
            self.step = step

    @staticmethod
    def _raise(answers: Sequence[Any]) -> None:
        for one in answers:
            if isinstance(one, UsageError | RunError):
                raise one


class Exports:
    """Exports of checkpoints, one at a time, each by a process of its own beside the run; the newest one is kept."""

    def __init__(self, directory: Path, form: str) -> None:
        self.directory, self.form = directory.absolute(), form
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._step, self._next = 0, 0

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint that was added."""
        return self._next

    def add(self, step: int) -> None:
        """Export the checkpoint of a step, after the export that is under way; an older one that waits is left out."""
        self._next = step
        if self._process is None:
            self._begin()

    def finished(self) -> tuple[int, Path] | None:
        """(step, folder) of an export that has become complete; RunError if that of the newest checkpoint has failed.

        A run that keeps few checkpoints (`checkpoint.keep`) may remove one before it is read.
        """
        if self._process is None or self._process.poll() is None:
            return None
        status, step = self._process.returncode, self._step
        errors = self._ended()
        if status:
            last = (errors.strip().splitlines() or ["no message"])[-1]
            message = f"the export of step {step} for the server of data.server failed: {last}"
            if self._next == step:
                raise RunError(message)
            log.warning("%s; that of step %d follows", message, self._next)
            self._begin()
            return None
        for older in (self.directory / FOLDER).glob("step_*"):
            if step_of(older) < step:
                rmtree(older, ignore_errors=True)
        if self._next > step:
            self._begin()
        return step, self._folder(step)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._ended()
            self._remove_partial()

    def _remove_partial(self) -> None:
        """Remove what an export that was ended has left."""
        for partial in (self.directory / FOLDER).glob(".export-*"):
            rmtree(partial, ignore_errors=True)

    def _ended(self) -> str:
        """Forget the process, which has ended; returns what it wrote to its error stream."""
        assert self._errors is not None
        with self._errors as errors:
            errors.seek(0)
            text = errors.read().decode(errors="replace")
        self._process = self._errors = None
        return text

    def _folder(self, step: int) -> Path:
        return self.directory / FOLDER / f"step_{step:08d}"

    def _begin(self) -> None:
        self._step = self._next
        folder = self._folder(self._step)
        self._remove_partial()
        rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(exist_ok=True)
        words = [str(os.getpid()), "checkpoint", "export", str(folder), "--to", self.form]
        words += ["--name", self.directory.name, "--step", str(self._step)]
        self._errors = TemporaryFile()  # noqa: SIM115 (a pipe that nobody reads would stop a process that writes much)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mplug_rollouts.exporting", *words],
            cwd=self.directory.parent.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )
