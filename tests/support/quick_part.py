"""A suite whose quick part is some of its tests: the others run in a wide set."""

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import pytest

Suite = TypeVar("Suite", bound=type)


def quick(*names: str, wide: str) -> Callable[[Suite], Suite]:
    """Mark every test of a suite but these as one of a wide set. The suite that it inherits them from stays as it is.

    For a second suite of a plugin, whose first one runs the other tests on the same code.
    """

    def divided(suite: Suite) -> Suite:
        tests = {name: getattr(suite, name) for name in dir(suite) if name.startswith("test_")}
        unknown = [name for name in names if not callable(tests.get(name))]
        assert not unknown, f"{suite.__name__} has no {unknown}"
        for name, test in tests.items():
            if callable(test) and name not in names:
                setattr(suite, name, pytest.mark.wide(wide)(_copy(test)))
        return suite

    return divided


def _copy(test: Any) -> FunctionType:
    """A function with the same code and marks of its own."""
    made = FunctionType(test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__)
    made.__kwdefaults__, made.__dict__, made.__doc__ = test.__kwdefaults__, dict(test.__dict__), test.__doc__
    made.__dict__["pytestmark"] = list(test.__dict__.get("pytestmark", []))
    return made
