"""Slots as data: sites, the suppliers and wraps that plugins offer, and the selection among them. Torch-free.

A slot is a callable attribute of an `mplug.nn` module, such as `Attention.core`. A *site* is one slot of one module of
a model. Plugins offer suppliers or wraps. Selection is pure: collect, select by config, refuse conflicts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mplug.errors import UsageError, listed, suggest

if TYPE_CHECKING:
    from mplug.config import Kernels
    from mplug.run import Run

SLOT_KINDS: dict[str, tuple[str, ...]] = {
    "attention": ("Attention.core",),
    "qk": ("Attention.prepare_qk", "Attention.prepare_qkv"),
    "linear": ("Linear.gemm", "Linear.gather", "Linear.scatter"),
    "norm": ("Norm.norm_residual",),
    "activation": ("MLP.activation",),
    "mlp": ("MLP.core",),
    "embedding": ("Embedding.lookup",),
    "dropout": ("Dropout.rows",),
    "loss": ("Loss.cross_entropy",),
    "router": ("Router.summed",),
    "experts": ("Experts.dispatch", "Experts.compute", "Experts.combine"),
}
"""Kinds of slots (the keys of the config's `kernels` section) -> the slots of each kind."""

CALLED_BY: dict[tuple[str, str], tuple[str, ...]] = {
    ("", "Attention.prepare_qk"): ("Attention.prepare_qkv",),
    ("", "MLP.activation"): ("Experts.compute", "MLP.core"),
    ("up", "Linear.gemm"): ("MLP.core",),
    ("up", "Linear.scatter"): ("MLP.core",),
    ("down", "Linear.gather"): ("MLP.core",),
    ("down", "Linear.gemm"): ("MLP.core",),
}
"""(part, slot) -> the wider slots whose default calls this slot. Other suppliers of a wider slot do not call it.

`part` is the name of the submodule that has the slot, in the module of the wider slot; '' is that module itself.
"""

KIND_OF = {slot: kind for kind, slots in SLOT_KINDS.items() for slot in slots}


UNIT = "Unit.call"
"""The slot of a `Wrap` around the call of a unit of the plan. Only the model supplies this slot."""

INVENTED = "what no site needs"
"""A need that no supplier knows."""

AGAIN = 1000
"""Wraps whose layer is at least this call the inner callable again (recomputation), with unchanged arguments."""

PLAIN = "plain torch"
"""The label of the default compositions of `mplug.nn`."""


def slots_named(words: Iterable[str], field: str) -> tuple[str, ...]:
    """The slots that a user's words name; each word is a kind ('attention') or a slot ('Attention.core').

    Raises UsageError for any other word. `field` is the config field that holds the words; the error names it.
    """
    found: dict[str, None] = {}
    for word in words:
        if word not in SLOT_KINDS and word not in KIND_OF:
            known = [*SLOT_KINDS, *KIND_OF]
            raise UsageError(f"{field}: '{word}' names no slot{suggest(word, known)} (kinds: {listed(SLOT_KINDS)})")
        found |= dict.fromkeys(SLOT_KINDS.get(word, (word,)))
    return tuple(found)


@dataclass(frozen=True)
class Site:
    """One slot of one module of a model.

    `role` is the module's name with its indices replaced by stars ('blocks.*.attn'); the sites of a role share one
    supplier. `module` is the `mplug.nn` module, on the meta device. `needs` are what a supplier must offer beyond the
    plain case. They come from the module (its attention's specification: 'document_lengths', 'window') and from the
    selected wraps ('log-sum-exp').
    """

    role: str
    slot: str
    module: Any
    name: str
    needs: frozenset[str] = frozenset()

    @property
    def not_offered(self) -> str:
        """The refusal of a supplier that offers only the plain case; empty if the site needs nothing more."""
        return self.lacking(())

    def lacking(self, offered: Iterable[str]) -> str:
        """The refusal of a supplier that offers `offered` beyond the plain case; empty if that suffices."""
        missing = self.needs.difference(offered)
        return f"it does not offer {', '.join(sorted(missing))}" if missing else ""


Supports = Callable[[Site, "Run"], bool | str]
"""(site, run) -> True; a reason why it cannot serve the site; or False if it is not meant for the site."""


def _refuse_unknown(slots: Iterable[str]) -> None:
    for slot in slots:
        if slot not in KIND_OF:
            raise ValueError(f"'{slot}' is not a slot{suggest(slot, KIND_OF)}")


def _always(site: Site, run: "Run") -> bool:
    return True


def _never(site: Site, run: "Run") -> str:
    return ""


@dataclass(frozen=True)
class Offer:
    """Suppliers for one slot, or for several slots of one module at once (a fused norm and gemm).

    `supports` must be truthful: only it states capabilities, and it must refuse every need that it does not know.
    `varies(site, run)` returns what in the supplier depends on the layout, or an empty string; attention whose dropout
    draws from torch's generators must report that. `note(site, run)` returns which of several implementations it will
    use ('cuDNN'), or an empty string.

    Each supplier is one callable for all sites of a role. It owns no parameter. A plugin that chooses between several
    suppliers makes one offer of each; only one of them may support a site. An unknown slot is a ValueError.
    """

    suppliers: Mapping[str, Callable[..., Any]]
    supports: Supports = _always
    varies: Callable[[Site, "Run"], str] = _never
    plugin: str = ""
    note: Callable[[Site, "Run"], str] = _never

    def __post_init__(self) -> None:
        _refuse_unknown(self.suppliers)

    def answer(self, site: Site, run: "Run") -> bool | str:
        """The answer of `supports` for a site, or a refusal if `supports` also accepts a need that does not exist."""
        answer = self.supports(site, run)
        if answer is True and site.needs:
            invented = replace(site, needs=site.needs | {INVENTED})
            if self.supports(invented, run) is True:
                needs = listed(sorted(site.needs))
                return f"the site needs {needs}, and its 'supports' grants needs that do not exist as well"
        return answer


@dataclass(frozen=True)
class Wrap:
    """A wrap of a slot: `wrap(inner)` takes the callable in the slot and returns the callable to use instead.

    `needs` are capabilities that the inner supplier must have; the host adds them to `site.needs` for its `supports`.
    `serves` are the needs of a site that the wrapped callable still meets. The host refuses a site that needs more.

    Wraps of one slot are applied from the smallest `layer` outwards:

    - 0: a wrap that calls the supplier part by part.
    - 50: a wrap that moves whole tensors between ranks.
    - 100: a wrap of a plugin that shards weights; it sees a slot's tensors as the sharded weights produce them.
    - `AGAIN` and above: a wrap that calls the inner callable again with unchanged arguments (recomputation). It serves
      every need.

    `note` names the method in a word if the plugin has several. A `dispensable` wrap changes no result: if the supplier
    of a wider slot does not call the wrapped slot, the run works without the wrap. An unknown slot is a ValueError.

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

    def __post_init__(self) -> None:
        if self.slot != UNIT:
            _refuse_unknown([self.slot])

    @property
    def told(self) -> str:
        """The plugin's label and the note: 'parallel/NAME (ring)'."""
        return f"{self.plugin} ({self.note})" if self.note else self.plugin

    def answer(self, site: Site, run: "Run") -> bool | str:
        """The answer of `supports` for a site, or a refusal if the wrap does not serve all needs of the site."""
        answer = self.supports(site, run)
        lost = sorted(site.needs - self.serves) if self.layer < AGAIN else []
        if answer is True and lost:
            return f"the site needs {listed(lost)}, and its wrap does not say that it serves that (Wrap.serves)"
        return answer


@dataclass(frozen=True)
class Filled:
    """The content of a site: its supplier (None: the default in plain torch) and its wraps, from inner to outer."""

    site: Site
    offer: Offer | None = None
    wraps: tuple[Wrap, ...] = ()

    @property
    def supplier(self) -> str:
        """The label of the supplying plugin."""
        return self.offer.plugin if self.offer else "the model" if self.site.slot == UNIT else PLAIN

    def told(self, run: "Run") -> str:
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
        """The kind of the slot, as the config's `kernels` section calls it."""
        return KIND_OF.get(self.site.slot, UNIT)

    def __str__(self) -> str:
        return f"{self.plugin} cannot serve {self.site.slot} of '{self.site.role}': {self.reason}"


@dataclass
class Selection:
    """The outcome of selecting: the content of every site, the wraps around units, and the unmet needs."""

    filled: list[Filled] = field(default_factory=list)
    units: list[Filled] = field(default_factory=list)
    unmet: list[Unmet] = field(default_factory=list)


def select(sites: Iterable[Site], offers: Iterable[Offer | Wrap], kernels: "Kernels", run: "Run") -> Selection:
    """Select a supplier and wraps for each site.

    An offer of a kernel plugin counts if the config names the plugin for every slot that the offer fills. A strategy's
    offers always count, and precede those of the default kernel. Raises UsageError, naming both plugins, if two
    suppliers claim one site or two plugins wrap one site at the same layer.
    """
    offers = list(offers)
    suppliers = [offer for offer in offers if isinstance(offer, Offer) and _named(offer, kernels)]
    wraps = [wrap for wrap in offers if isinstance(wrap, Wrap)]
    selection = Selection()
    for site in sites:
        if site.slot == UNIT:
            around, unmet = _wraps_of(site, wraps, run)
            selection.units += [Filled(site, None, around)] if around else []
            selection.unmet += unmet
            continue
        around, unmet = _wraps_of(site, wraps, run)
        site = replace(site, needs=site.needs.union(*(wrap.needs for wrap in around)))
        supplier, reasons = _supplier_of(site, suppliers, kernels, run)
        selection.filled.append(Filled(site, supplier, around))
        selection.unmet += [*unmet, *reasons]
    selection.unmet += _idle(selection, kernels)
    _refuse_uncalled(selection.filled, kernels)
    return selection


def _idle(selection: Selection, kernels: "Kernels") -> list[Unmet]:
    """Plugins that the config names for a kind, and that fill no site of this kind although the model has some."""
    working = {(KIND_OF[one.site.slot], one.supplier) for one in selection.filled}
    told = {(one.kind, one.plugin) for one in selection.unmet}
    first = {KIND_OF[one.site.slot]: one.site for one in reversed(selection.filled)}
    return [
        Unmet(named, first[kind], f"of the slots of the kind '{kind}' that this model has, it fills none")
        for kind, named in kernels.kinds.items()
        if named and kind in first and (kind, named) not in working | told
    ]


def _refuse_uncalled(filled: list[Filled], kernels: "Kernels") -> None:
    """Refuse a supplier or wrap that would never run, because another supplier replaces the wider slot around it.

    Suppliers of the default kernel are exempt: they are fallbacks.
    """
    suppliers = {(one.site.name, one.site.slot): one.supplier for one in filled if one.offer}
    for one in filled:
        uncalled = [wrap.plugin for wrap in one.wraps if not wrap.dispensable]
        if one.offer and one.supplier != kernels.default:
            uncalled.append(one.supplier)
        for fused, wider in _around(one.site, suppliers):
            lost = [plugin for plugin in uncalled if plugin != fused]
            if lost:
                raise UsageError(
                    f"{fused} fills {wider} of '{one.site.role}', and would not call what {lost[0]} puts into "
                    f"{one.site.slot}; set kernels.{KIND_OF[wider]}=null, or use a layout without {lost[0]}"
                )


def _around(site: Site, suppliers: Mapping[tuple[str, str], str]) -> Iterator[tuple[str, str]]:
    """(supplier, slot) of the wider slots around a site that have a supplier."""
    parent, _, child = site.name.rpartition(".")
    for name, part in ((site.name, ""), (parent, child)):
        for wider in CALLED_BY.get((part, site.slot), ()):
            if (name, wider) in suppliers:
                yield suppliers[name, wider], wider


def _named(offer: Offer, kernels: "Kernels") -> bool:
    is_kernel = offer.plugin.startswith("kernels/")
    return not is_kernel or all(kernels.chosen(KIND_OF[slot]) == offer.plugin for slot in offer.suppliers)


def _wraps_of(site: Site, wraps: list[Wrap], run: "Run") -> tuple[tuple[Wrap, ...], list[Unmet]]:
    answers = [(wrap, wrap.answer(site, run)) for wrap in wraps if wrap.slot == site.slot]
    around = sorted((wrap for wrap, answer in answers if answer is True), key=lambda wrap: wrap.layer)
    for inner, outer in pairwise(around):
        if inner.layer == outer.layer and inner.plugin != outer.plugin:
            raise UsageError(
                f"{inner.plugin} and {outer.plugin} both wrap {site.slot} of '{site.role}' at layer {inner.layer}, and "
                f"nothing says which is outside; name one of them"
            )
    return tuple(around), [Unmet(wrap.plugin, site, answer) for wrap, answer in answers if isinstance(answer, str)]


def _supplier_of(
    site: Site, suppliers: list[Offer], kernels: "Kernels", run: "Run"
) -> tuple[Offer | None, list[Unmet]]:
    answers = [(offer, offer.answer(site, run)) for offer in suppliers if site.slot in offer.suppliers]
    able, kind = [offer for offer, answer in answers if answer is True], KIND_OF[site.slot]
    if kind not in kernels.kinds:  # the default kernel is the fallback for slots without another supplier
        able = [offer for offer in able if offer.plugin != kernels.default] or able
    if len(able) > 1:
        raise UsageError(
            f"{listed(offer.plugin for offer in able)} both claim {site.slot} of '{site.role}'; "
            f"change kernels.{kind} or the layout so that one of them remains"
        )
    if able:
        return able[0], []
    named = kernels.chosen(kind)
    unmet = [Unmet(offer.plugin, site, answer) for offer, answer in answers if isinstance(answer, str)]
    if named and kind in kernels.kinds and not _supplies(kind, [offer for offer in suppliers if offer.plugin == named]):
        unmet.append(Unmet(named, site, f"it supplies no slot of the kind '{kind}' alone"))
    if not unmet and (lacking := site.lacking(_offered_in_plain_torch(site))):
        unmet.append(Unmet(PLAIN, site, lacking))
    return None, unmet


def _offered_in_plain_torch(site: Site) -> frozenset[str]:
    default = getattr(site.module, site.slot.rpartition(".")[2], None)
    return getattr(default, "offers", frozenset())


def _supplies(kind: str, offers: list[Offer]) -> bool:
    return any(KIND_OF[slot] == kind for offer in offers for slot in offer.suppliers)
