"""What a scan or a short convolution keeps of earlier positions when a model samples: its state, of constant size.

B samples, S positions of a call. Padding of shorter prompts is in front (`mplug_nn.cache`); no state contains any.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mplug_nn.cache import CacheSize
from mplug_nn.mixers.specification import MixerInputs
from mplug_nn.static_cache import Clock

Call = Callable[[slice, MixerInputs], tuple[Tensor, Tensor]]
"""(rows of the arguments, inputs with a start state) -> (y of these rows, the end state)."""


class StateCache:
    """The state of one scan or convolution after the positions that no later call brings again.

    A call may bring the last `size.again` positions of the one before once more, and a state cannot be taken back. So
    each call computes them apart from the positions before them, and keeps the state between the two parts.
    """

    def __init__(self, size: CacheSize) -> None:
        self.size = size
        self.length = 0
        """Positions so far, with padding."""
        self.state: Tensor | None = None
        """[B, ...]: the state after the first `length - size.again` positions; None before the first call."""

    @property
    def num_bytes(self) -> int:
        """The bytes of the state."""
        return 0 if self.state is None else self.state.nbytes

    def rewind(self, positions: int) -> None:
        """Forget the last positions; the next call brings them again."""
        if positions != (self.size.again if self.length else 0):
            raise ValueError(f"a state with again={self.size.again} cannot forget {positions} positions")
        self.length -= positions

    def through(self, call: Call, positions: int) -> Tensor:
        """y of `positions` new positions, by `call` from the state before them; the state moves on."""
        if self.length + positions > self.size.positions:
            raise ValueError(f"a cache for {self.size.positions} positions cannot hold {self.length + positions}")
        kept = positions - self.size.again
        y, self.state = call(slice(0, kept), self._inputs(self.length, kept))
        if self.size.again:
            more, _ = call(slice(kept, positions), self._inputs(self.length + kept, self.size.again))
            y = torch.cat((y, more), dim=1)
        self.length += positions
        return y

    def _inputs(self, before: int, count: int) -> MixerInputs:
        """The inputs of `count` positions behind `before`: padding is a document of its own."""
        padding, state = self.size.padding, self.state
        if padding is None or before > self.size.most_padding:
            return MixerInputs(None, state)
        if state is not None:  # of padding, where the sample has not begun
            begun = (padding < before).view(-1, *(1 for _ in state.shape[1:]))
            state = torch.where(begun, state, 0.0)
        inside = (padding - before).clamp(0, count)
        return MixerInputs(torch.stack((inside, count - inside), dim=1), state)


class StaticStateCache(StateCache):
    """A state in a buffer that keeps its address, so that a CUDA graph can replay the step of a token."""

    def __init__(self, size: CacheSize, clock: Clock) -> None:
        super().__init__(size)
        self.clock = clock

    def rewind(self, positions: int) -> None:
        """A static cache has one new position in every call, and forgets none."""
        if positions:
            raise ValueError("a static cache forgets no positions")

    def through(self, call: Call, positions: int) -> Tensor:
        """y of prompts, or of one new position of each sample."""
        prompts = self.clock.reads_prompts
        y, end = call(slice(0, positions), self._of_prompts(positions) if prompts else MixerInputs(None, self.state))
        if self.state is None:
            self.state = end.contiguous()
        else:
            self.state.copy_(end)
        return y

    def grow(self, positions: int) -> None:
        """A state has the same size for any number of positions."""

    def replace_sample(self, sample: int, other: "StaticStateCache") -> None:
        """The state of the only sample of another cache becomes that of one sample."""
        assert other.state is not None
        if self.state is None:
            self.state = other.state.new_zeros(len(self.clock.positions), *other.state.shape[1:])
        self.state[sample].copy_(other.state[0])

    def _of_prompts(self, positions: int) -> MixerInputs:
        padding = self.clock.padding
        return MixerInputs(None if padding is None else torch.stack((padding, positions - padding), dim=1))


def state_cache(size: CacheSize) -> StateCache:
    """An empty cache of a state: of the kind that the size makes."""
    if size.make_state is None:
        return StateCache(size)
    made: StateCache = size.make_state(size)
    return made
