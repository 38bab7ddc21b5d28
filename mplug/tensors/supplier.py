"""What fills a slot, and what it states about itself. Imports no torch.

A slot holds a plain callable, which states nothing; a `Supplier`, a callable with statements; or another object with
statements, whose functions a block calls by name (`WeightProduct`). A block whose slots have further statements derives
its own class from `Supplier`, with a typed field for each. The host and wraps read statements with `statements_of`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Statements:
    """What the content of a slot states about itself. These are the statements of a plain callable."""

    calls: tuple[str, ...] = ()
    """The narrower slots that the content calls itself. The host refuses suppliers of the others, which never run."""

    @property
    def is_replaceable(self) -> bool:
        """Whether it states enough for the supplier of a wider slot to do its work, as a collective with a boundary."""
        return False


NOTHING_STATED = Statements()


@dataclass(frozen=True, eq=False)
class Supplier(Statements, Generic[P, R]):
    """A function for a slot, with its statements. A call of it is a call of the function.

    A wrap may return a plain callable. It then states nothing, whatever the callable inside it states: a statement is
    about one function, and the wrap makes another.
    """

    function: Callable[P, R]
    calls: tuple[str, ...] = ()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function."""
        return self.function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Supplier[P, R]":
        """Itself, as for a function: copies of a model have the same content in their slots."""
        return self


def statements_of(content: object) -> Statements:
    """What the content of a slot states about itself."""
    return content if isinstance(content, Statements) else NOTHING_STATED
