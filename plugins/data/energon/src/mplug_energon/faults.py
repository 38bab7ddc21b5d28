"""Samples that cannot be used: why, and how many."""

import logging
from collections import Counter
from typing import Any

from mplug import RunError, UsageError
from mplug_energon.sources import message_of, where

log = logging.getLogger("mplug.energon")


class Unusable(UsageError):
    """A sample that cannot be used. `kind` is the name under which it is counted: 'a missing file'."""

    def __init__(self, message: str, kind: str = "another reason") -> None:
        super().__init__(message)
        self.kind = kind


def stop(error: Exception, sample: Any, sources: Any = None) -> None:
    """An error handler that ends the run with an error that names the sample and its sources."""
    named = where(sample, sources)
    if isinstance(error, UsageError | RunError):
        raise type(error)(f"{named}: {error}" if named else str(error)) from error
    raise RunError(
        f"a sample of the data set cannot be used{named and f' ({named})'}: {message_of(error)}; correct it, or set "
        f"data.on_error=skip"
    ) from error


class Skip:
    """An error handler that logs the sample and its sources, and counts the samples that this process has omitted."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __call__(self, error: Exception, sample: Any, sources: Any = None) -> None:
        """Log one line about a sample, with the counts so far; of an unexpected error also its traceback."""
        expected = isinstance(error, UsageError | RunError)
        self.counts[error.kind if isinstance(error, Unusable) else type(error).__name__] += 1
        log.warning(
            "a sample is omitted (%s): %s; this process has omitted %s",
            where(sample, sources) or "without a key",
            error if expected else message_of(error),
            ", ".join(f"{count} for {kind}" for kind, count in self.counts.most_common()),
            exc_info=None if expected else error,
        )
