"""Slots as data: what may fill them, what plugins offer, and which offers a run selects. Torch-free.

A slot is a callable attribute of an `mplug.nn` module, such as `Attention.core`. A *site* is one slot of one module of
a model. Plugins offer suppliers or wraps; selecting is pure: collect, select by config, refuse conflicts.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mplug.errors import UsageError, listed

if TYPE_CHECKING:
    from mplug.run import Run

SLOT_KINDS: dict[str, tuple[str, ...]] = {
    "attention": ("Attention.core",),
    "qk": ("Attention.prepare_qk",),
    "linear": ("Linear.gemm", "Linear.gather", "Linear.scatter"),
    "norm": ("Norm.norm_residual",),
    "activation": ("MLP.activation",),
    "embedding": ("Embedding.lookup",),
    "loss": ("Loss.cross_entropy",),
}
"""Kinds of slots, the words of the config's `kernels` section -> the slots themselves."""

KIND_OF = {slot: kind for kind, slots in SLOT_KINDS.items() for slot in slots}


@dataclass(frozen=True)
class Site:
    """One slot of one module of a model.

    `role` is the module's name with indices starred ('blocks.*.attn'): the sites of a role share one supplier.
    `module` is the `mplug.nn` module, on the meta device. `needs` are what the selected wraps ask of the supplier.
    """

    role: str
    slot: str
    module: Any
    name: str
    needs: frozenset[str] = frozenset()


def _always(site: Site, run: "Run") -> bool:
    return True


def _never(site: Site, run: "Run") -> str:
    return ""


@dataclass(frozen=True)
class Offer:
    """Suppliers for one slot, or for several of one module at once (a fused norm and gemm).

    `supports(site, run)` answers True or the reason why not, truthfully: capabilities live there and nowhere else.
    `varies(site, run)` says what about it depends on the layout, or nothing. Each supplier is one callable for all
    sites of a role; it owns no parameter.
    """

    suppliers: Mapping[str, Callable[..., Any]]
    supports: Callable[[Site, "Run"], bool | str] = _always
    varies: Callable[[Site, "Run"], str] = _never
    plugin: str = ""


@dataclass(frozen=True)
class Wrap:
    """What a plugin puts around whatever fills a slot: `wrap(inner)` returns the wrapped callable.

    `needs` are capabilities that the inner supplier must have (its `supports` is asked, as `site.needs`). Wraps of one
    slot are applied from the smallest `layer` outwards.
    """

    slot: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    layer: int
    needs: frozenset[str] = frozenset()
    supports: Callable[[Site, "Run"], bool | str] = _always
    plugin: str = ""


@dataclass(frozen=True)
class Filled:
    """What a site gets: its supplier (None: the default composition in plain torch) and the wraps, inner to outer."""

    site: Site
    offer: Offer | None = None
    wraps: tuple[Wrap, ...] = ()

    @property
    def supplier(self) -> str:
        """The label of the plugin that supplies it."""
        return self.offer.plugin if self.offer else "plain torch"


@dataclass(frozen=True)
class Unmet:
    """A plugin that the config names for a kind of slot, and cannot serve a site."""

    kind: str
    plugin: str
    site: Site
    reason: str

    def __str__(self) -> str:
        return f"{self.plugin} cannot supply {self.site.slot} of '{self.site.role}': {self.reason}"


@dataclass
class Selection:
    """The outcome of selecting: what fills every site, and the needs that nobody meets."""

    filled: list[Filled] = field(default_factory=list)
    unmet: list[Unmet] = field(default_factory=list)


def select(
    sites: Iterable[Site], offers: Iterable[Offer | Wrap], kernels: Callable[[str], str | None], run: "Run"
) -> Selection:
    """What fills each site.

    `kernels(kind)` is the label of the kernel plugin that the config names for a kind of slot, or None. An offer of a
    kernel plugin counts where the config names it for every slot that it fills; a strategy's offers always count.
    Raises UsageError where two selected suppliers claim one site, naming both.
    """
    offers = list(offers)
    selection = Selection()
    for site in sites:
        kind = KIND_OF[site.slot]
        wraps = [o for o in offers if isinstance(o, Wrap) and o.slot == site.slot and o.supports(site, run) is True]
        site = replace(site, needs=frozenset().union(*(wrap.needs for wrap in wraps)))
        claims = [o for o in offers if isinstance(o, Offer) and site.slot in o.suppliers and _chosen(o, kernels)]
        answers = {id(offer): offer.supports(site, run) for offer in claims}
        able = [offer for offer in claims if answers[id(offer)] is True]
        if len(able) > 1:
            raise UsageError(
                f"{listed(offer.plugin for offer in able)} both claim {site.slot} of '{site.role}'; "
                f"set kernels.{kind} so that one of them remains"
            )
        named = kernels(kind)
        if named and not any(offer.plugin == named for offer in able):
            reasons = [str(answers[id(offer)]) for offer in claims if offer.plugin == named]
            if reasons or not any(_offers_kind(offer, named, kind) for offer in offers):
                selection.unmet.append(Unmet(kind, named, site, "; ".join(reasons) or f"it offers no {kind} slot"))
        ordered = tuple(sorted(wraps, key=lambda wrap: (wrap.layer, wrap.plugin)))
        selection.filled.append(Filled(site, able[0] if able else None, ordered))
    return selection


def _chosen(offer: Offer, kernels: Callable[[str], str | None]) -> bool:
    if not offer.plugin.startswith("kernels/"):
        return True
    return all(kernels(KIND_OF[slot]) == offer.plugin for slot in offer.suppliers)


def _offers_kind(offer: Offer | Wrap, plugin: str, kind: str) -> bool:
    slots = offer.suppliers if isinstance(offer, Offer) else (offer.slot,)
    return offer.plugin == plugin and any(KIND_OF[slot] == kind for slot in slots)
