"""The thread of a rank that copies checkpoints to a store while training continues."""

import logging
import sys
import threading
from pathlib import Path
from queue import Queue

from mplug import RunError
from mplug_store.address import Store
from mplug_store.checkpoints import IDENTITY, prune
from mplug_store.upload import Copy, publish

log = logging.getLogger("mplug")


class Worker:
    """Copies checkpoints in the order in which a run saves them. All ranks copy the same ones.

    A copy that fails is reported, and the next one is tried. `keep` is the number of checkpoints to keep in the store,
    and `seconds` how long rank 0 waits for a file of another rank.
    """

    def __init__(self, store: Store, directory: Path, rank: int, keep: int, seconds: float) -> None:
        self.store, self.directory, self.rank, self.keep, self.seconds = store, directory, rank, keep, seconds
        self._waiting: Queue[tuple[Copy, bool] | None] = Queue(maxsize=1)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, daemon=True, name="store")
        self._thread.start()

    def add(self, copy: Copy, newest: bool) -> None:
        """Hand over a checkpoint; waits while another one waits. `newest`: the copy makes other ones obsolete."""
        self._raise_error()
        self._waiting.put((copy, newest))

    def end(self, seconds: float) -> None:
        """Complete the copies. A copy that takes longer than so many seconds is abandoned."""
        if self._within(seconds):
            self._raise_error()
        else:
            self._report(f"the last checkpoint is not in '{self.store.address}' after {seconds:g} s")

    def _within(self, seconds: float) -> bool:
        def ask_to_end() -> None:
            self._waiting.put(None)

        threading.Thread(target=ask_to_end, daemon=True).start()  # the queue may be full
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (taken := self._waiting.get()) is not None:
            copy, newest = taken
            try:
                self._copy(copy, newest)
            except (RunError, OSError) as error:
                label = f"step {copy.manifest.step} is not in '{self.store.address}'"
                self._report(f"{label}: {error}; the run continues, and copies its next checkpoint")
            except Exception as error:  # a bug: the next hook raises it, and the host reports it
                self._error = error
            finally:
                copy.close()

    def _copy(self, copy: Copy, newest: bool) -> None:
        copy.upload(self.store)
        if self.rank != 0:
            self._identify()
            return
        publish(self.store, copy.manifest, self.directory, self.seconds)
        log.info("copied the checkpoint to '%s/%s'", self.store.address, copy.manifest.folder)
        for folder in prune(self.store, copy.manifest, self.keep) if newest else ():
            log.info("removed '%s/%s'", self.store.address, folder)

    def _identify(self) -> None:
        """Name the run in a folder that rank 0 does not see, as `refuse_other_run` has done in that of rank 0."""
        path = self.directory / IDENTITY
        if not path.exists() and (content := self.store.read(IDENTITY)) is not None:
            temporary = path.with_name(f".{IDENTITY}.{self.rank}.partial")
            temporary.write_bytes(content)
            temporary.replace(path)

    def _report(self, message: str) -> None:
        log.warning("%s", message)
        if self.rank == 0:
            print(f"mplug: {message}", file=sys.stderr)

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
