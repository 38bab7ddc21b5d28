"""Parameters whose meaning is declared where a module creates them."""

from typing import Any

import pytest
import torch
from torch import nn

from mplug import Buffer, Declared, Entries, Init, Inits, Parameter, Segment, declare, describe, parameter

INITS = Inits.normal(0.02, 0.01)
ONES = Init("constant", value=1.0)
MLP = Segment("mlp", 6)


class Scan(nn.Module):
    """A block of plain torch: a parameter of its own, linears of torch, and a statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = parameter((6,), (MLP,), ONES, over=("batch",))
        self.enter = declare(nn.Linear(4, 12), weight=Declared(((MLP, MLP), "embed")), bias=Declared(((MLP, MLP),)))
        self.leave = declare(nn.Linear(6, 4, bias=False), weight=Declared(("embed", MLP), "residual", decay=False))
        self.count = nn.Module()
        self.count.register_buffer("seen", torch.zeros(2))
        declare(self.count, seen=Buffer(("item",), over=("batch",)))


def test_declarations_become_the_entries_of_the_plan() -> None:
    described = describe(nn.ModuleList([Scan(), Scan()]), INITS)
    assert described.parameters == {
        "*.decay": Parameter((MLP,), ONES, over=("batch",)),
        "*.enter.weight": Parameter(((MLP, MLP), "embed"), INITS.weight),
        "*.enter.bias": Parameter(((MLP, MLP),), INITS.weight),
        "*.leave.weight": Parameter(("embed", MLP), INITS.residual, decay=False),
    }
    assert described.buffers == {"*.count.seen": Buffer(("item",), over=("batch",))}


class Inner(nn.Module):
    """Says one thing where it creates its parameter, and another in plan_entries."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter((4, 6), ("tensor", "x"))

    def plan_entries(self, inits: Inits) -> Entries:
        """It decides over the tensor's own declaration."""
        return {"weight": Parameter(("entries", "x"), inits.weight)}


class Outer(nn.Module):
    """Contains one."""

    def __init__(self, inner: nn.Module, entries: Entries) -> None:
        super().__init__()
        self.inner, self.entries = inner, entries

    def plan_entries(self, inits: Inits) -> Entries:
        """What the test says."""
        return self.entries


def test_the_outermost_declaration_decides() -> None:
    def axis(module: nn.Module) -> Any:
        (entry,) = describe(module, INITS).parameters.values()
        return entry.dims[0]

    outer = {"inner.weight": Parameter(("outer", "x"), INITS.weight)}
    assert axis(Inner()) == "entries"
    assert axis(Outer(declare(Inner(), weight=Declared(("declared", "x"))), {})) == "declared"
    assert axis(Outer(declare(Inner(), weight=Declared(("declared", "x"))), outer)) == "outer"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: parameter((4, 6), ("embed",)), r"a parameter has shape \(4, 6\), and 1 dimension declared"),
        (lambda: parameter((4, 8), ("embed", MLP)), r"the segments of dimension 1 do not sum to 8"),
        (lambda: declare(nn.Linear(4, 6), wieght=Declared(("mlp", "embed"))), "no parameter or buffer 'wieght'; did"),
        (lambda: declare(nn.Linear(4, 6), bias=Declared(("mlp", "embed"))), r"'bias' of Linear has shape \(6,\)"),
    ],
)
def test_a_declaration_that_does_not_fit_is_refused_where_it_stands(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
