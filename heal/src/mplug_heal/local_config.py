"""The settings of local checkpoints."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt


class LocalConfig(BaseModel):
    """Where the local checkpoints are, and how often they are saved."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: str = Field(
        description="an absolute path on the local disk of each machine; variables of the environment of each "
        "process are replaced, as in '$SLURM_TMPDIR/mplug'"
    )
    every: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="steps between two local checkpoints; 'auto': the interval that loses the least time, by the "
        "measured cost and checkpoint.hours_between_failures",
    )
    keep: PositiveInt = Field(
        1, description="complete local checkpoints that stay on the disks; while one is written, it is one more"
    )
    peer: bool | None = Field(
        None,
        description="whether each machine also keeps the parts of another one; null: yes, if there are several",
    )
    machine: str | None = Field(
        None,
        description="a name of what fails together, such as '$RACK': copies are kept under another name; null: the "
        "host",
    )
