"""The slot of scans, and the module that holds it. B batch, S sequence, G key heads, H value heads."""

from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from mplug.layout.work import ActivationProduct, Flops, Step
from mplug.model.slots.declaration import Slot, set_defaults
from mplug_nn.attention import refuse_documents
from mplug_nn.cache import CacheSize
from mplug_nn.mixers.chunked import chunked_scan
from mplug_nn.mixers.specification import DOCUMENTS, SCANS, MixerInputs, ScanKind, ScanSpec
from mplug_nn.mixers.states import StateCache, state_cache


def needs_of_spec(module: nn.Module, entries: Container[str]) -> frozenset[str]:
    """What a core must offer for the specification of a scan or of a convolution."""
    spec = getattr(module, "spec", None)
    return frozenset() if spec is None else replace(spec, documents=spec.documents or DOCUMENTS in entries).needs


SCAN = Slot("Scan.core", "scan", chunked_scan, serves=SCANS, needs=needs_of_spec)


class Scan(nn.Module):
    """A scan without projections. `num_heads` (value heads) and `num_key_heads` are those of the whole model.

    It declares that it mixes the sequence although only its slot does: what does not know the slot (a strategy that
    divides the sequence) must refuse it.

    While a model samples, the host may give the module a `cache` (`mplug_nn.mixers.states`). The module then receives
    only the last positions of its samples, and begins with the state in the cache.
    """

    SLOTS: ClassVar[tuple[Slot, ...]] = (SCAN,)
    mixes: ClassVar[frozenset[str]] = frozenset({"sequence"})
    caches: ClassVar[bool] = True
    static_cache: ClassVar[bool] = True
    cache: StateCache | None = None
    core: Callable[..., tuple[Tensor, Tensor]]

    def __init__(
        self, kind: ScanKind, num_heads: int, num_key_heads: int, key_width: int, value_width: int, scale: float
    ) -> None:
        super().__init__()
        if num_heads % num_key_heads:
            raise ValueError(f"{num_key_heads} key heads do not divide {num_heads} value heads")
        self.num_heads, self.num_key_heads = num_heads, num_key_heads
        self.spec = ScanSpec(kind, scale, key_width, value_width)
        set_defaults(self)

    def plan_work(self) -> Step:
        """The recurrence: per head and position 2 K V multiply-adds (write, read), 3 K V with the delta rule.

        It counts neither the products inside a chunk, by which an implementation replaces the steps, nor decays.
        """
        products = (3 if self.spec.corrects else 2) * self.spec.key_width * self.spec.value_width
        return (ActivationProduct(Flops(6 * self.num_heads * products, 0)),)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        write: Tensor | None = None,
        document_lengths: Tensor | None = None,
    ) -> Tensor:
        """The arguments of the slot -> y [B, S, H, V]."""
        if self.cache is not None:
            refuse_documents(document_lengths)
            return self.cache.through(partial(self._part, q, k, v, decay, write), v.shape[1])
        spec = replace(self.spec, documents=document_lengths is not None)
        y, _ = self.core(q, k, v, decay, write, spec, MixerInputs(document_lengths))
        return y

    def _part(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, write: Tensor | None, rows: slice, inputs: MixerInputs
    ) -> tuple[Tensor, Tensor]:
        """(y, end state) of some rows of the arguments."""
        spec = replace(self.spec, documents=inputs.document_lengths is not None)
        part = None if write is None else write[:, rows]
        return self.core(q[:, rows], k[:, rows], v[:, rows], decay[:, rows], part, spec, inputs)

    def serve_cache(self) -> None:
        """Make the module serve a cache from now on: its core must take and return states."""
        self.spec = replace(self.spec, states=True)

    def new_cache(self, size: CacheSize) -> StateCache:
        """An empty cache: a state [B, H, K, V] in at least fp32."""
        return state_cache(size)
