"""Registers functions as torch operators: a compiled graph has one opaque node for each call."""

from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def operator(name: str, mutates_args: Iterable[str] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function with annotated arguments as the operator `name` ('namespace::name'), on every device.

    The function may change only the arguments in `mutates_args`, and its results must not share memory with an argument
    or with each other: a compiler relies on both. A compiled unit raises RuntimeError for a result that shares memory.
    Unless the function returns nothing, `fake(name)` must define the results for tensors without memory. The operator
    has no derivative: for a gradient, call it inside a `torch.autograd.Function`. In return, a call costs little CPU
    time: `torch.library.custom_op` adds five Python functions to each call, and a micro batch makes hundreds of calls.
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
    """Register a function as the fake implementation of the operator `name`: it returns tensors of the right shapes."""
    marked: Callable[[Callable[P, R]], Callable[P, R]] = torch.library.register_fake(name)
    return marked


def _nothing(*args: Any, **named: Any) -> None:
    """The fake implementation of operators that only mutate their arguments."""
