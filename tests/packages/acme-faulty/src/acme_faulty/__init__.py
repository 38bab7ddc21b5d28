"""Extensions that must be refused when they are loaded, each for one reason."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from mplug import hookimpl


class Empty(BaseModel):
    """Nothing to set."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Extension:
    """What a sound extension has."""

    Config = Empty

    def __init__(self, config: Any) -> None:
        self.config = config


class MisspeltHook(Extension):
    """`step_finish` is not a hook."""

    @hookimpl
    def step_finish(self, run: Any) -> None:
        """Never called."""


class UnknownArgument(Extension):
    """`step_finished` has no argument `recrod`."""

    @hookimpl
    def step_finished(self, run: Any, recrod: Any) -> None:
        """Never called."""


class DefaultedArgument(Extension):
    """`step_finished` has no argument `recrod`, and pluggy would leave the default in place."""

    @hookimpl
    def step_finished(self, run: Any, recrod: Any = None) -> None:
        """Never called."""


class UnmarkedHook(Extension):
    """`run_started` lacks its mark, and pluggy would not see it."""

    def run_started(self, run: Any) -> None:
        """Never called."""


class NoConfig:
    """It has no Config."""

    def __init__(self, config: Any) -> None:
        self.config = config


class OpenConfig(Extension):
    """A misspelt field would be swallowed."""

    class Config(BaseModel):
        """It does not forbid unknown fields."""

        size: int = Field(1, description="a number")


class UndescribedField(Extension):
    """Nobody could know what to set."""

    class Config(Empty):
        """One field without a description."""

        mystery: int = 1


def not_a_class(config: Any) -> None:
    """A plugin is a class."""
