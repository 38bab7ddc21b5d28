"""The right of one command to train a run, as the host uses it."""

from typing import Protocol


class Claim(Protocol):
    """The lock of a run's folder. The launcher passes a copy to the process of rank 0, and both may confirm it."""

    def confirm(self) -> None:
        """Raise RunError if another process has taken over the lock, or if the file system fails."""

    def keep(self) -> None:
        """Confirm the lock if some seconds have passed since the last time. Called after every step."""

    def held(self) -> bool:
        """Whether this command still holds the lock."""
