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

from mplug import Model, Offer, Run, Wrap
from mplug.commands import Filled, Selection, contents_of, select_offers

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
    for label, own in run.hooks.each(OWN, run=run, model=model):
        offers += [replace(one, plugin=label) for one in own if label in dividing]
    return select_offers(model, run, offers)


def form_of_slots(selection: Selection, sampling: Selection) -> Form:
    """The contents of slots that differ in the selection of sampling from those of training."""
    pairs = zip(selection.filled, sampling.filled, strict=True)
    others = Selection([own for training, own in pairs if _differ(training, own)])
    return Form([(site.module, site.declared.attribute, content) for site, content in contents_of(others)])


def _differ(one: Filled, other: Filled) -> bool:
    return one.offer is not other.offer or one.wraps != other.wraps


def _assign(values: Iterable[tuple[nn.Module, str, Any]]) -> None:
    for module, name, value in values:
        setattr(module, name, value)
