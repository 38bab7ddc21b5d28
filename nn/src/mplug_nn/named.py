"""The functions behind the names of an open list, as modules and slots look them up. See `mplug.OpenList`."""

from collections.abc import Callable, Collection, Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor

from mplug.registry.open_lists import OpenList

Function = TypeVar("Function")
NUMBERS = (0.5, -1.5, 2.0, -0.25, 1.25, -3.0, 0.75, 3.5)
"""Two rows of four numbers, with which entries of other distributions are tried."""
ROUNDING = 1e-9


def tried_numbers() -> Tensor:
    """[2, 4], in fp64 on the CPU."""
    return torch.tensor(NUMBERS, dtype=torch.float64, device="cpu").view(2, 4)


def differs_in_parts(compute: Callable[..., Tensor], dim: int, *inputs: Tensor) -> bool:
    """Whether the result of whole tensors differs from those of their halves along a dimension, or has another shape.

    A function that draws random numbers differs too.
    """
    whole = compute(*inputs)
    halves = [compute(*parts) for parts in zip(*(x.chunk(2, dim) for x in inputs), strict=True)]
    joined = torch.cat(halves, dim)
    return whole.shape != joined.shape or not bool(((whole - joined).abs() <= ROUNDING).all())


def _sound(_: object) -> str:
    return ""


class Named(Generic[Function]):
    """The loaded entries of an open list, each of type `expected`.

    Every supplier can be asked for the `plain` names. Any other name is a need of its sites. `fault` tries an entry of
    another distribution with a few numbers, and returns the sentence's end of what is wrong with it, or an empty text:
    layouts rely on what the list says about its entries.
    """

    def __init__(
        self,
        names: OpenList,
        expected: type[Function],
        plain: Collection[str],
        fault: Callable[[Function], str] = _sound,
    ) -> None:
        self.list, self.expected, self.plain, self.fault = names, expected, frozenset(plain), fault
        self._loaded: dict[str, Function] = {}

    def load(self, name: str) -> Function:
        """The entry of a name; ValueError if it is unknown, claimed twice, of another type, or has a fault."""
        found = self.list.load(name)
        if not isinstance(found, self.expected):
            raise ValueError(
                f"the {self.list.noun} '{name}' is {found!r}; its entry point must name a mplug_nn."
                f"{self.expected.__name__}"
            )
        if name not in self.list.own and name not in self._loaded:
            self._refuse_faulty(name, found)
        self._loaded[name] = found
        return found

    def _refuse_faulty(self, name: str, found: Function) -> None:
        with torch.device("cpu"), torch.no_grad():
            try:
                fault = self.fault(found)
            except Exception as error:  # of the entry's own code
                fault = f"fails for fp64 numbers on the CPU: {type(error).__name__}: {error}"
        if fault:
            raise ValueError(f"the {self.list.noun} '{name}' {fault}")

    def __getitem__(self, name: str) -> Function:
        """`load`, for code that a compiler traces: an entry that was loaded before is a constant."""
        found = self._loaded.get(name)
        return self.load(name) if found is None else found

    def needs(self, name: str) -> frozenset[str]:
        """What a supplier that computes this entry must offer beyond the plain case: 'relu2 activation'."""
        return frozenset() if name in self.plain else frozenset({f"{name} {self.list.noun}"})


class NeedsOf:
    """The needs of all entries of a list: `offers` of a supplier that looks names up in it."""

    def __init__(self, named: "Named[Function]") -> None:
        self._named = named

    def __iter__(self) -> Iterator[str]:
        return iter([need for name in self._named.list.names() for need in self._named.needs(name)])
