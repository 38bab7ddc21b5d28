"""The stream on which a process records its work."""

import torch


def use_own_stream() -> None:
    """Make a new stream the current one of this thread, if that is the default stream.

    The default stream cannot be recorded. Autograd also runs the end of backward on the stream that was current when a
    gradient sink was made, so the stream changes before the model gets memory.
    """
    current = torch.cuda.current_stream()
    if current == torch.cuda.default_stream():
        stream = torch.cuda.Stream()
        stream.wait_stream(current)
        torch.cuda.set_stream(stream)
