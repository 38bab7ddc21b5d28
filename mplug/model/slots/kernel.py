"""`kernel` makes a plugin of one function that supplies a slot. Imports neither torch nor pydantic."""

from collections.abc import Callable, Container, Iterable, Mapping
from functools import cached_property, update_wrapper
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from mplug.model.slots.offers import Offer, Site, Supports
from mplug.registry.implementation import hookimpl
from mplug.registry.made_plugin import MadePlugin

if TYPE_CHECKING:
    from mplug.run.run import Run

P = ParamSpec("P")
R = TypeVar("R")


class Kernel(MadePlugin, Generic[P, R]):
    """A function that is a kernel plugin without options. Calling it calls the function."""

    def __init__(self, function: Callable[P, R], captures: bool | str | None, offer: Offer) -> None:
        update_wrapper(self, function)
        self.function, self.captures, self.offer = function, captures, offer

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> R:
        """What the function returns."""
        return self.function(*arguments, **named)

    @cached_property
    def plugin(self) -> type[Any]:
        """The class of the plugin: an empty section, and the hooks `offer` and `captures`."""
        from pydantic import BaseModel, ConfigDict  # listing plugins does not need it

        class Config(BaseModel):
            """No options."""

            model_config = ConfigDict(extra="forbid", frozen=True)

        def create(plugin: Any, config: Config) -> None:
            plugin.config = config

        def offer(plugin: Any) -> list[Offer]:
            return [self.offer]

        members: dict[str, Any] = {
            "Config": Config,
            "__init__": create,
            "offer": hookimpl(offer),
            "__doc__": self.function.__doc__,
        }
        if self.captures is not None:
            members["captures"] = self.captures
        return type(self.function.__name__, (), {**members, "__module__": self.function.__module__})


def kernel(
    slot: str,
    *,
    serves: Iterable[str] = frozenset(),
    captures: bool | str | None = None,
    supports: Supports | None = None,
    varies: "Callable[[Site, Run], str] | None" = None,
    requires: frozenset[str] = frozenset(),
    optional: bool = False,
    devices: tuple[str, ...] = (),
    dtypes: tuple[str, ...] = (),
    chips: tuple[str, ...] = (),
    shapes: Mapping[str, Container[int]] | None = None,
    rate: float = 0.0,
) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Make a kernel plugin of a function that supplies a slot; its entry point names the function.

    The arguments are those of `Offer`: what the function serves, where it runs, and its rate. `captures` is the answer
    to the hook of this name: whether a CUDA graph can replay the function, or a clause with the reason against it;
    None: unknown. A plugin with options, with several slots, or with suppliers that depend on the run is a class with
    the hook `offer` instead. The module must not import torch: import it in the function.
    """
    given: dict[str, Any] = {"supports": supports, "varies": varies, "shapes": shapes}
    chosen = {name: value for name, value in given.items() if value is not None}

    def made(function: Callable[P, R]) -> Kernel[P, R]:
        offer = Offer(
            {slot: function},
            serves=frozenset(serves),
            requires=requires,
            optional=optional,
            devices=devices,
            dtypes=dtypes,
            chips=chips,
            rate=rate,
            captures=captures,
            **chosen,
        )
        return Kernel(function, captures, offer)

    return made
