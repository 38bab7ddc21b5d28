"""A model family whose name another distribution claims as well."""

from pydantic import BaseModel, ConfigDict, Field


class Mini:
    """Tells by its config whose it is."""

    class Config(BaseModel):
        """One field of its own."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        acme_width: int = Field(25, description="a number that only this family has")

    def __init__(self, config: Config) -> None:
        self.config = config
