"""What plugins offer for slots: suppliers and wraps, and the sites that they fill. Imports no torch."""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mplug.errors import listed
from mplug.layout.plan import TOKENS_AXIS, Parameter, axes_of
from mplug.model.slots.declaration import Slot, slot_of
from mplug.model.slots.kernel_limits import Limits
from mplug.model.slots.slot_buffer import SlotBuffer

if TYPE_CHECKING:
    from torch import Tensor

    from mplug.config.binding import Kernels
    from mplug.run.run import Run

UNIT = "Unit.call"
"""The slot of a `Wrap` around the call of a unit of the plan. Only the model supplies this slot."""
_UNIT = Slot(UNIT, "unit")
RECOMPUTING = 1000
"""Wraps whose layer is at least this call the inner callable again (recomputation), with unchanged arguments."""
PLAIN = "plain torch"
"""The label of the slots' defaults."""


@dataclass(frozen=True)
class Site:
    """One slot of one module of a model.

    `role` is the module's name with its indices replaced by stars ('blocks.*.attn'); the sites of a role share one
    supplier. `module` is the block, on the meta device. `needs` are what a supplier must offer beyond the plain case.
    They come from the module ('document_lengths', 'window') and from the selected wraps ('log-sum-exp'). `parameters`
    are the plan's entries of the module's own parameters, by name. `within` are the sites of other modules, as (name,
    slot), whose default calls this slot. `sequence` is the named axis along which the rows of the module's unit lie:
    that of the tokens, or of a stream (`Unit.sequence`).
    """

    role: str
    slot: str
    module: Any
    name: str
    needs: frozenset[str] = frozenset()
    parameters: Mapping[str, Parameter] = field(default_factory=dict, compare=False)
    within: frozenset[tuple[str, str]] = frozenset()
    sequence: str = TOKENS_AXIS

    @property
    def declared(self) -> Slot:
        """What the class of the module declares about the slot."""
        return _UNIT if self.slot == UNIT else slot_of(self.module, self.slot)

    @property
    def kind(self) -> str:
        """The kind of the slot, as the config's `kernels` section calls it."""
        return self.declared.kind

    @property
    def content(self) -> Any:
        """What the slot of the module holds."""
        return getattr(self.module, self.declared.attribute)

    def axes(self, parameter: str, dim: int) -> tuple[str, ...]:
        """The named axes of one dimension of a parameter of the module, for `over` of a `SlotBuffer`."""
        return tuple(sorted(axes_of([self.parameters[parameter].dims[dim]])))

    def lacking(self, offered: Iterable[str]) -> str:
        """The refusal of a supplier that offers `offered` beyond the plain case; empty if that suffices."""
        missing = self.needs.difference(offered)
        return f"it does not offer {', '.join(sorted(missing))}" if missing else ""


Supports = Callable[[Site, "Run"], bool | str]
"""(site, run) -> True; a reason why it cannot serve the site; or False if it is not meant for the site."""


def _always(site: Site, run: "Run") -> bool:
    return True


def _never(site: Site, run: "Run") -> str:
    return ""


def _no_buffers(site: Site) -> Mapping[str, SlotBuffer]:
    return {}


StepEnded = Callable[[Mapping[str, "Tensor"]], Mapping[str, "Tensor"]]
"""The buffers of all sites of a role, stacked along dimension 0, at the end of a step -> the new values of states."""


@dataclass(frozen=True)
class Offer:
    """Suppliers for one slot, or for several slots of one module at once (a fused norm and gemm).

    What a supplier can compute is data where data can say it. The host refuses a site that asks for anything else:

    - `serves`: the needs of a site (`Site.needs`) that it serves beyond the plain case. Every other need is refused.
    - `requires`: needs that a site must have; the offer is not meant for other sites.
    - `devices` ('cuda', 'cpu'), `dtypes` of activations ('bfloat16'), `chips`: where it runs; empty: everywhere. A
      chip is a compute capability of CUDA ('9.0'), or the oldest of them ('8.0+').
    - `shapes`: sizes by attribute of the site's module: {'head_dim': range(8, 129, 8)}.

    `supports(site, run)` says the rest. The host calls it for sites that pass all of these, and the answer is True, a
    reason against the site, or False if the offer is not meant for the site. If an `optional` offer does not serve the
    needs of a site, the site keeps its default in plain torch, unless the config names the plugin for the kind of slot.
    A `partial` offer may be named for a model of which it serves only some sites: the others keep their default.

    `varies(site, run)` returns what in the supplier depends on the layout, or an empty string; a kernel whose dropout
    draws from torch's generators must report that (the host then seeds them for every unit). `note(site, run)` returns
    which of several implementations it will use ('cuDNN'), or an empty string.

    Each supplier is one callable for all sites of a role. It owns no parameter. A plugin that chooses between several
    suppliers makes one offer of each; only one of them may support a site. Slots that the model lacks are ignored.

    A `fallback` fills a site only if no other offer does: a strategy offers a faster way to compute, and a kernel that
    the config names replaces it. If a fallback refuses a site, the default in plain torch fills the slot.

    `buffers(site)` declares the tensors that the supplier keeps for a site, by name. It is pure. The host registers
    them with the site's module, places them, and passes them to the supplier as the keyword argument `buffers`, a
    mapping from names to tensors. The supplier writes statistics only, by operators (`mplug_nn.count`, `keep_max`, ...)
    whose values do not influence results before the step ends. `step_ended(stacked)` is called once after each step.
    It receives all buffers of the sites of a role, each with one more dimension in front (the sites). It returns the
    new values of some states, with the same dimension, and changes no argument. The host discards them if the step is
    skipped.

    `rate` orders the suppliers of default kernels, if the config names several: the one with the highest rate fills a
    site. It is the speed of forward and backward in TFLOP/s on an H200, measured at shapes of a large model. An offer
    with the rate 0 does not compete. `captures` is the answer of this hook for this supplier; None: the plugin's.
    With `trainer.graphs`, an offer that competes and does not state True wins only if none that states it serves.

    A supplier that `keeps_pairs` keeps a value for every pair of positions for backward. The estimate of
    a run's memory reads it.
    """

    suppliers: Mapping[str, Any]
    supports: Supports = _always
    varies: Callable[[Site, "Run"], str] = _never
    plugin: str = ""
    note: Callable[[Site, "Run"], str] = _never
    buffers: Callable[[Site], Mapping[str, SlotBuffer]] = _no_buffers
    fallback: bool = False
    step_ended: StepEnded | None = None
    serves: Iterable[str] = frozenset()
    requires: frozenset[str] = frozenset()
    optional: bool = False
    partial: bool = False
    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    chips: tuple[str, ...] = ()
    shapes: Mapping[str, Container[int]] = field(default_factory=dict)
    keeps_pairs: bool = False
    rate: float = 0.0
    captures: bool | str | None = None

    @property
    def keeps_buffers(self) -> bool:
        """Whether the supplier may keep buffers for a site."""
        return self.buffers is not _no_buffers

    def competes(self, kernels: "Kernels") -> bool:
        """Whether it is of one of several default kernels, and has a rate."""
        return self.rate > 0 and self.plugin in kernels.rivals

    def answer(self, site: Site, run: "Run") -> bool | str:
        """True, a reason against a site, or False if the offer is not meant for it; by its data, then by `supports`."""
        if not self.requires <= site.needs:
            return False
        if lacking := site.lacking(self.serves):
            is_named = not self.optional or site.kind in run.config.kernels.kinds or self.competes(run.config.kernels)
            return lacking if is_named else False
        limits = Limits(self.devices, self.dtypes, self.chips, self.shapes)
        return limits.reason(site.module, run) or self.supports(site, run)


@dataclass(frozen=True)
class Wrap:
    """A wrap of a slot: `wrap(inner)` takes the callable in the slot and returns the callable to use instead.

    `needs` are capabilities that the inner supplier must have; the host adds them to `site.needs` for its `supports`.
    `serves` are the needs of a site that the wrapped callable still meets. The host refuses a site that needs more.

    Wraps of one slot are applied from the smallest `layer` outwards:

    - 0: a wrap that calls the supplier part by part.
    - 50: a wrap that moves whole tensors between ranks.
    - 100: a wrap of a plugin that shards weights; it sees a slot's tensors as the sharded weights produce them.
    - `RECOMPUTING` and above: a wrap that calls the inner callable again with unchanged arguments (recomputation), or
      with parts of them where each position is computed by itself. It serves every need.

    `note` names the method in a word if the plugin has several. A `dispensable` wrap changes no result: if the supplier
    of a wider slot does not call the wrapped slot, the run works without the wrap.

    The host refuses a wrap below `RECOMPUTING` around a slot of a unit of a stream unless the wrap declares that it is
    right there too (`streams`): ranks that divide the tokens need not divide the rows of a stream.

    A wrap that `passes_buffers` passes the keyword argument `buffers` on unchanged. The host refuses any other wrap
    below `RECOMPUTING` around a supplier that declares buffers.

    The estimate of a run's memory takes a wrap from `RECOMPUTING` on to keep only the arguments of the inner callable.
    If it `moves`, it keeps them in the memory of the CPU. If it calls the inner callable with a part of the sequence at
    a time, `tile` is the number of positions; 0: it does not.

    Ranks with different samples may call an `uneven` wrap that exchanges tensors at the same time with different sizes.

    The slot `UNIT` is the call of a unit: `site.module` is the unit's module, `site.name` its name. These wraps
    surround the compiled unit and stay eager. They take and return what the unit takes and returns.
    """

    slot: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    layer: int
    needs: frozenset[str] = frozenset()
    supports: Supports = _always
    plugin: str = ""
    note: str = ""
    dispensable: bool = False
    serves: frozenset[str] = frozenset()
    passes_buffers: bool = False
    streams: bool = False
    moves: bool = False
    tile: int = 0
    uneven: bool = False

    @property
    def label(self) -> str:
        """The plugin's label and the note: 'parallel/NAME (ring)'."""
        return f"{self.plugin} ({self.note})" if self.note else self.plugin

    def answer(self, site: Site, run: "Run") -> bool | str:
        """The answer of `supports` for a site, or a refusal if the wrap does not serve all needs of the site."""
        answer = self.supports(site, run)
        unserved = sorted(site.needs - self.serves) if self.layer < RECOMPUTING else []
        if answer is True and unserved:
            return f"the site needs {listed(unserved)}, and the plugin's wrap does not declare it in Wrap.serves"
        if answer is True and self.layer < RECOMPUTING and site.sequence != TOKENS_AXIS and not self.streams:
            return f"the site computes rows of {site.sequence}, and the plugin's wrap does not declare Wrap.streams"
        return answer


@dataclass(frozen=True)
class Filled:
    """The content of a site: its supplier (None: the default in plain torch) and its wraps, from inner to outer.

    `rivals` are the answers of default kernels that competed for the site.
    """

    site: Site
    offer: Offer | None = None
    wraps: tuple[Wrap, ...] = ()
    rivals: tuple[tuple[Offer, bool | str], ...] = ()

    @property
    def supplier(self) -> str:
        """The label of the supplying plugin."""
        return self.offer.plugin if self.offer else "the model" if self.site.slot == UNIT else PLAIN

    def supplier_label(self, run: "Run") -> str:
        """The supplier's label and its note: 'kernels/NAME (cuDNN)'."""
        note = self.offer.note(self.site, run) if self.offer else ""
        return f"{self.supplier} ({note})" if note else self.supplier


@dataclass(frozen=True)
class Unmet:
    """Why a plugin that the config names cannot serve a site."""

    plugin: str
    site: Site
    reason: str

    @property
    def kind(self) -> str:
        """The kind of the slot."""
        return self.site.kind

    def __str__(self) -> str:
        return f"{self.plugin} cannot serve {self.site.slot} of '{self.site.role}': {self.reason}"
