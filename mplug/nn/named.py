"""The functions behind the names of an open list, as modules and slots look them up. See `mplug.open_lists`."""

from collections.abc import Collection, Iterator
from typing import Generic, TypeVar

from mplug.open_lists import OpenList

Function = TypeVar("Function")


class Named(Generic[Function]):
    """The loaded entries of an open list, each of type `expected`.

    Every supplier can be asked for the `plain` names. Any other name is a need of its sites.
    """

    def __init__(self, names: OpenList, expected: type[Function], plain: Collection[str]) -> None:
        self.list, self.expected, self.plain = names, expected, frozenset(plain)
        self._loaded: dict[str, Function] = {}

    def load(self, name: str) -> Function:
        """The entry of a name; ValueError if it is unknown, claimed twice, or of another type."""
        found = self.list.load(name)
        if not isinstance(found, self.expected):
            raise ValueError(
                f"the {self.list.noun} '{name}' is {found!r}; its entry point must name a mplug.nn."
                f"{self.expected.__name__}"
            )
        self._loaded[name] = found
        return found

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
