"""The section `kernels.fla` of a config."""

from pydantic import BaseModel, ConfigDict, Field


class FlaConfig(BaseModel):
    """How many variants of each kernel are tried."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    variants: int | None = Field(
        None,
        gt=0,
        description="variants of each kernel that the first step tries by their speed; null: all. "
        "1 makes the first step shorter by minutes",
    )
