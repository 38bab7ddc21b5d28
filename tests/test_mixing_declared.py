"""What classes and plans say of the tokens that modules mix, and which of it counts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from torch import Tensor, nn

from mplug import Flops, Model, Plan, Unit, UsageError
from mplug.model.mixing import statements
from mplug_nn import MLP


class Silent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Declared(Silent):
    mixes: ClassVar[frozenset[str]] = frozenset({"sequence"})


class Smaller(Declared):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)


class Other(Declared):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(1)


class Wider(MLP):
    def activate(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return x.roll(1, 1)


class Configured(Silent):
    def __init__(self, axes: Any) -> None:
        super().__init__()
        self.axes = axes

    @property
    def mixes(self) -> Any:
        return self.axes


def model_of(**modules: nn.Module) -> Model:
    """A model whose units are these modules."""
    units = tuple(Unit(name, ("hidden",), ("hidden",)) for name in modules)
    tokens = ("batch", "sequence")
    plan = Plan(units, {}, {"tokens": tokens}, {"hidden": (*tokens, "embed")}, Flops(0, 0))
    return Model(nn.ModuleDict(modules), plan)


def known_of(module: nn.Module) -> frozenset[str] | None:
    return statements(model_of(unit=module))[0].axes


@pytest.mark.parametrize(
    ("module", "axes"),
    [
        (Silent(), None),
        (Declared(), {"sequence"}),
        (Smaller(), {"sequence"}),  # the code that was declared
        (Other(), None),  # other code than the one that was declared
        (Wider(4, 8, "gelu", False), None),
        (Configured({"batch", "sequence"}), {"batch", "sequence"}),
        (Configured(()), set()),
        (nn.LayerNorm(4), set()),
        (nn.LayerNorm((3, 4)), None),
        (nn.Conv1d(2, 2, 3), None),
        (nn.BatchNorm1d(2), None),
        (nn.Sequential(), set()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_declaration_covers_the_code_of_the_class_that_makes_it(module: nn.Module, axes: set[str] | None) -> None:
    assert known_of(module) == axes


def test_each_module_inside_a_declared_one_needs_a_declaration_of_its_own() -> None:
    block = Declared()
    block.inner = nn.ModuleList([Silent(), Declared()])
    found = {one.name: one.axes for one in statements(model_of(unit=block))}
    assert found == {"unit": {"sequence"}, "unit.inner": set(), "unit.inner.0": None, "unit.inner.1": {"sequence"}}


@pytest.mark.parametrize("value", ["sequence", 3, [3]])
def test_a_declaration_that_is_no_set_of_names_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"`mixes` of Configured is .*; it must be a set of named axes"):
        known_of(Configured(value))


def test_a_declaration_of_one_object_is_refused() -> None:
    module = Silent()
    module.mixes = frozenset()
    with pytest.raises(UsageError, match="'unit' sets `mixes` on itself; make it an attribute or a property"):
        known_of(module)


def test_a_declared_axis_that_the_plan_does_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match=r"mixes 'sequnce', and no .* has this axis; did you mean 'sequence'\?"):
        known_of(Configured({"sequnce"}))


def test_the_plan_declares_for_classes_of_other_packages_with_all_that_is_in_them() -> None:
    def found(**mixing: tuple[str, ...]) -> Mapping[str, frozenset[str] | None]:
        block = Declared()
        block.conv = nn.Sequential(nn.Conv1d(2, 2, 3))
        model = model_of(unit=block)
        patterns = {f"unit.{name}": axes for name, axes in mixing.items()}
        model.plan = replace(model.plan, mixing=patterns)
        return {one.name: one.axes for one in statements(model)}

    assert found()["unit.conv.0"] is None
    of_conv = {"unit.conv": frozenset({"sequence"}), "unit.conv.0": frozenset()}
    assert found(conv=("sequence",)) == {"unit": frozenset({"sequence"}), **of_conv}
    with pytest.raises(UsageError, match=r"no module matches 'unit\.cnov'; did you mean"):
        found(cnov=("sequence",))
