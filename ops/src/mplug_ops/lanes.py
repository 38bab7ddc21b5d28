"""Streams for transfers beside the computation."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Lane:
    """A stream of transfers, in the order in which they start; on a CPU, `stream` is None, and they end at once."""

    def __init__(self, device: torch.device) -> None:
        high = -1  # so that copies and collectives start although products fill the device
        self.stream = torch.cuda.Stream(device, priority=high) if device.type == "cuda" else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run the block on this stream, after everything that has been launched on the current one."""
        if self.stream is None:
            yield
            return
        self.follow()
        with torch.cuda.stream(self.stream):
            yield

    def follow(self) -> None:
        """Let this stream wait for everything that has been launched on the current one."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    def mark(self) -> "torch.cuda.Event | None":
        """The end of everything that has been launched on this stream."""
        return None if self.stream is None else self.stream.record_event()


def wait_for(event: "torch.cuda.Event | None") -> None:
    """Let the current stream wait for an event of the lane."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
