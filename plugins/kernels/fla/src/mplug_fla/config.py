"""The section `kernels.fla` of a config."""

from pydantic import BaseModel, ConfigDict, Field


class FlaConfig(BaseModel):
    """The consent to kernels that have failed, and how many variants of each are tried."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    experimental: bool = Field(
        False, description="use the kernels, although a large decoder failed with them on a GPU (see the README)"
    )
    variants: int | None = Field(
        None,
        gt=0,
        description="variants of each kernel that the first step tries by their speed; null: all that are known "
        "to be right. 1 makes the first step shorter by minutes",
    )
