"""Short causal convolutions of each channel alone. B batch, S sequence, C channels, W width, M documents."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from mplug.layout.work import Step, WeightProduct
from mplug.model.slots.declaration import Slot, set_defaults
from mplug.tensors.segments import numbered
from mplug_nn.attention import refuse_documents
from mplug_nn.cache import CacheSize
from mplug_nn.mixers.scan import needs_of_spec
from mplug_nn.mixers.specification import CONVOLUTIONS, NOTHING, ConvolutionSpec, MixerInputs
from mplug_nn.mixers.states import StateCache, state_cache


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, spec: ConvolutionSpec, inputs: MixerInputs = NOTHING
) -> tuple[Tensor, Tensor]:
    """A short convolution as `spec` describes it: the default of the slot `Convolution.core`.

    x [B, S, C], weight [C, W], bias [C] or None -> (y [B, S, C], end state [B, W - 1, C]), in the dtype of x; sums are
    those of at least fp32. The end state are the last W - 1 rows of start state and x; rows of another document than
    that of the last row are zeros. A supplier that does not offer 'states' may return None for it.
    """
    earlier, length = spec.width - 1, x.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = _rows(x, earlier, inputs.state)
    reach = _reach(inputs.document_lengths, length, earlier)
    total = None if bias is None else bias.to(wide)
    for distance in range(spec.width):
        taken = rows[:, earlier - distance : earlier - distance + length]
        if reach is not None and distance:
            taken = taken.masked_fill((reach < distance)[..., None], 0.0)
        term = taken.to(wide) * weight[:, earlier - distance].to(wide)
        total = term if total is None else total + term
    assert total is not None
    return (silu(total) if spec.silu else total).to(x.dtype), end_rows(x, spec, inputs)


def end_rows(x: Tensor, spec: ConvolutionSpec, inputs: MixerInputs = NOTHING) -> Tensor:
    """The end state [B, W - 1, C] of a short convolution of x [B, S, C]; a supplier need not compute it by a kernel."""
    earlier, length = spec.width - 1, x.shape[1]
    end = _rows(x[:, max(0, length - earlier) :], earlier, inputs.state)[:, -earlier:] if earlier else x[:, :0]
    reach = _reach(inputs.document_lengths, length, earlier)
    if reach is not None:
        distances = torch.arange(earlier - 1, -1, -1, device=x.device)
        end = end.masked_fill((distances > reach[:, -1:])[..., None], 0.0)
    return end


def _rows(x: Tensor, earlier: int, state: Tensor | None) -> Tensor:
    """x behind the `earlier` rows of its start state, or behind zeros."""
    return pad(x, (0, 0, earlier, 0)) if state is None else torch.cat((state.to(x.dtype), x), dim=1)


def _reach(lengths: Tensor | None, length: int, earlier: int) -> Tensor | None:
    """How many rows before each position belong to its document [B, S], with `earlier` rows of a start state."""
    if lengths is None:
        return None
    numbers = numbered(lengths, length)
    ends = lengths.cumsum(dim=1)
    starts = (ends - lengths).gather(1, numbers)  # [B, S]
    places = torch.arange(length, device=lengths.device)
    return places - starts + earlier * (numbers == numbers[:, :1])


CONVOLUTION = Slot("Convolution.core", "convolution", short_convolution, serves=CONVOLUTIONS, needs=needs_of_spec)


class Convolution(nn.Module):
    """A short causal convolution with its weights. The block around it declares what its channels are.

    `mixes` and `cache` are as for `mplug_nn.Scan`.
    """

    SLOTS: ClassVar[tuple[Slot, ...]] = (CONVOLUTION,)
    mixes: ClassVar[frozenset[str]] = frozenset({"sequence"})
    caches: ClassVar[bool] = True
    static_cache: ClassVar[bool] = True
    cache: StateCache | None = None
    core: Callable[..., tuple[Tensor, Tensor]]

    def __init__(self, channels: int, width: int, *, bias: bool = False, silu: bool = True) -> None:
        super().__init__()
        self.spec = ConvolutionSpec(width, silu)
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        set_defaults(self)

    def plan_work(self) -> Step:
        """Every position is multiplied by each element of the weight once."""
        return (WeightProduct("weight", self.weight.numel()),)

    def forward(self, x: Tensor, document_lengths: Tensor | None = None) -> Tensor:
        """[B, S, C] -> [B, S, C]."""
        if self.cache is not None:
            refuse_documents(document_lengths)
            return self.cache.through(partial(self._part, x), x.shape[1])
        spec = replace(self.spec, documents=document_lengths is not None)
        y, _ = self.core(x, self.weight, self.bias, spec, MixerInputs(document_lengths))
        return y

    def _part(self, x: Tensor, rows: slice, inputs: MixerInputs) -> tuple[Tensor, Tensor]:
        """(y, end state) of some rows of x."""
        spec = replace(self.spec, documents=inputs.document_lengths is not None)
        return self.core(x[:, rows], self.weight, self.bias, spec, inputs)

    def serve_cache(self) -> None:
        """Make the module serve a cache from now on: its core must take and return states."""
        self.spec = replace(self.spec, states=True)

    def new_cache(self, size: CacheSize) -> StateCache:
        """An empty cache: the last W - 1 rows [B, W - 1, C]."""
        return state_cache(size)
