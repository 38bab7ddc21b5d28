"""What differs in the modules of a model that trains while it samples.

A call of sampling has whole texts, of which most have one position; a call of training has the parts of samples that
the layout gives to a rank. So a strategy that divides the positions of a sample has other suppliers and wraps for
sampling (the hook `offer_undivided`), and modules serve caches only then.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from mplug import Model, Offer, Run, UsageError, Wrap
from mplug.commands import Selection, contents_of, select_offers

OWN = "offer_undivided"
"""The hook of strategies that divide positions."""


@dataclass
class Form:
    """Values of attributes of modules: (module, name of the attribute, value)."""

    values: list[tuple[nn.Module, str, Any]] = field(default_factory=list)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """In the block, the attributes have these values, and before and after it the same ones."""
        before = [(module, name, getattr(module, name)) for module, name, _ in self.values]
        try:
            _assign(self.values)
            yield
        finally:
            _assign(before)


def form_of_caches(modules: Iterable[nn.Module]) -> Form:
    """What serving caches changes in modules, which do not serve them afterwards."""
    values = []
    for module in modules:
        before = dict(vars(module))
        module.serve_cache()  # type: ignore[operator]
        changed = {name: value for name, value in vars(module).items() if value is not before[name]}
        values += [(module, name, value) for name, value in changed.items()]
        _assign((module, name, before[name]) for name in changed)
    return Form(values)


def selected_undivided(run: Run, model: Model, selection: Selection, dividing: Collection[str]) -> Selection:
    """The selection for calls with all positions; `selection` is that of training, and changes nothing.

    `dividing` are the labels of the strategies that divide positions in training.
    """
    offers: list[Offer | Wrap] = [one for one in selection.offers if one.plugin not in dividing]
    if dividing:
        offers = [one for one in offers if not _joins_positions(one, model)]
    for label, own in run.hooks.each(OWN, run=run, model=model):
        offers += [replace(one, plugin=label) for one in own if label in dividing]
    return select_offers(model, run, offers)


def _joins_positions(offer: Offer | Wrap, model: Model) -> bool:
    """Whether an offer makes whole sequences of the positions of ranks: a call of sampling has them."""
    slots = () if isinstance(offer, Wrap) else (model.declared.get(name) for name in offer.suppliers)
    return any(slot is not None and (slot.joins_sequences or slot.gathers_positions) for slot in slots)


def form_of_slots(selection: Selection, sampling: Selection) -> Form:
    """The contents of slots that differ in the selection of sampling from those of training.

    UsageError if one of them keeps buffers, because the model has the buffers of training.
    """
    found = []
    for training, own in zip(selection.filled, sampling.filled, strict=True):
        if own.offer is not training.offer and own.offer is not None and own.offer.keeps_buffers:
            raise UsageError(
                f"{own.supplier} would fill {own.site.slot} of '{own.site.role}' while the model samples, and not "
                f"while it trains, and it keeps buffers; use another kernel there"
            )
        if own.offer is not training.offer or own.wraps != training.wraps:
            found.append(own)
    return Form([(site.module, site.declared.attribute, one) for site, one in contents_of(Selection(found))])


def _assign(values: Iterable[tuple[nn.Module, str, Any]]) -> None:
    for module, name, value in values:
        setattr(module, name, value)
