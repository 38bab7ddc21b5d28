"""Sound, but for another host."""

from pydantic import BaseModel, ConfigDict


class Future:
    """It does nothing yet."""

    class Config(BaseModel):
        """Nothing to set."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        self.config = config
