"""The progress of `mplug teach` on the error stream: a bar on a terminal, else a line now and then."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

LINE_SECONDS = 30.0
"""Seconds between two lines."""


@contextmanager
def shown(number: int | None) -> Iterator[Callable[[int], None]]:
    """In the block, show how many of `number` samples are done: call the function with those since the last call.

    With None, it shows nothing.
    """
    if number is None:
        yield lambda _: None
    elif sys.stderr.isatty():
        with click.progressbar(length=number, label="samples", file=sys.stderr, show_pos=True) as bar:
            yield bar.update
    else:
        yield _Lines(number).advance


class _Lines:
    """A line every `LINE_SECONDS`, with the rate of this command."""

    def __init__(self, number: int) -> None:
        self.number, self.done, self.before = number, 0, 0
        self.began = self.said = time.monotonic()

    def advance(self, samples: int) -> None:
        """Say it if it is time."""
        if not self.done:
            self.before = samples  # those of an interrupted command, or a first round that compiles
            self.began = time.monotonic()
        self.done += samples
        now = time.monotonic()
        if now < self.said + LINE_SECONDS or self.done == self.before:
            return
        self.said = now
        rate = (self.done - self.before) / (now - self.began)
        left = (self.number - self.done) / rate
        click.echo(f"{self.done:,} of {self.number:,} samples, {rate:,.1f}/s, {left / 60:,.0f} min left", err=True)
