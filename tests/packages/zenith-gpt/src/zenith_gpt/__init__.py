"""A model family and an extension whose names another distribution claims too: their configs tell whose they are."""

from pydantic import BaseModel, ConfigDict, Field

from mplug import hookimpl


class Mini:
    """A model family."""

    class Config(BaseModel):
        """One field of its own."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        zenith_width: int = Field(131, description="a number that only this family has")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_model(self) -> None:
        raise NotImplementedError("only its config is ever asked for")


class Dial:
    """An extension."""

    class Config(BaseModel):
        """One field of its own."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        zenith_dial: int = Field(131, description="a number that only this extension has")

    def __init__(self, config: Config) -> None:
        self.config = config
