"""Two ways to stand on another plugin's feet."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from mplug import Offer, hookimpl


class Empty(BaseModel):
    """Nothing to set."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Usurper:
    """An extension that builds a model, beside the run's model family."""

    Config = Empty

    def __init__(self, config: Empty) -> None:
        self.config = config

    @hookimpl
    def build_model(self) -> Any:
        """Never called."""
        raise AssertionError("two plugins answer build_model, and one of them was called")


class Meddler:
    """An extension that supplies the attention core, beside the run's kernel."""

    Config = Empty

    def __init__(self, config: Empty) -> None:
        self.config = config

    @hookimpl
    def offer(self) -> list[Offer]:
        """Never selected beside another."""
        return [Offer({"Attention.core": _attention})]


def _attention(*arguments: Any, **named: Any) -> Any:
    raise AssertionError("two suppliers claim the attention core, and one of them was called")
