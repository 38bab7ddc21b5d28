"""The config of the strategy."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mplug import MAY_CHANGE


class DeepSpeedConfig(BaseModel):
    """The stage of ZeRO, what is kept in the host's memory, and a config file of DeepSpeed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stage: Annotated[Literal[1, 2, 3] | None, MAY_CHANGE] = Field(
        None,
        description="what ranks shard: 1 optimizer states, 2 gradients too, 3 weights too; null: the stage of the "
        "file, or 1 without one",
    )
    offload_optimizer: Annotated[bool | None, MAY_CHANGE] = Field(
        None,
        description="keep masters and optimizer states in the host's memory, and update them there; null: as in the "
        "file",
    )
    offload_param: Annotated[bool | None, MAY_CHANGE] = Field(
        None, description="keep weights in the host's memory between their uses (stage 3 only); null: as in the file"
    )
    nvme_path: Annotated[str | None, MAY_CHANGE] = Field(
        None,
        description="a folder on a local disk: what is offloaded is in files there instead of in the host's memory "
        "(stage 3 only); null: as in the file",
    )
    config: Annotated[str | None, MAY_CHANGE] = Field(
        None,
        description="a config file of DeepSpeed (JSON). Values that the run's own settings determine are 'auto' or "
        "equal to them; all others reach DeepSpeed unchanged",
    )
