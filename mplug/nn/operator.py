"""Operators of torch that are ours: in a compiled graph each is one node, whose inside no compiler sees."""

from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def operator(name: str, mutates_args: Iterable[str] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function of annotated arguments the operator `name` ('namespace::name'), on every device.

    Unless it returns nothing, `fake(name)` must say what. It has no derivative: who needs one calls it inside of a
    `torch.autograd.Function`. For that, a call costs the host little: `torch.library.custom_op` puts five more
    functions in Python around each, and a micro batch makes hundreds of calls.
    """

    def declare(function: Callable[P, R]) -> Callable[P, R]:
        schema = torch.library.infer_schema(function, mutates_args=mutates_args)
        torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(name, "CompositeExplicitAutograd", function)
        if schema.endswith("-> ()"):
            fake(name)(_nothing)
        namespace, _, own = name.partition("::")
        declared: Callable[P, R] = getattr(getattr(torch.ops, namespace), own).default
        return declared

    return declare


def fake(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function what the operator `name` does to tensors without memory: what it returns has the right shapes."""
    marked: Callable[[Callable[P, R]], Callable[P, R]] = torch.library.register_fake(name)
    return marked


def _nothing(*args: Any, **named: Any) -> None:
    """What operators do to tensors without memory if all that they do is to change some."""
