"""The section `kernels.fla` of a config."""

from pydantic import BaseModel, ConfigDict, Field


class FlaConfig(BaseModel):
    """The consent to kernels that have failed, and how many variants of each are tried."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    experimental: bool = Field(
        False,
        description="use the kernels, although losses of compiled decoders with them were not compared on a GPU yet",
    )
    variants: int | None = Field(
        None,
        gt=0,
        description="variants of each kernel that the first step tries by their speed; null: all. "
        "1 makes the first step shorter by minutes",
    )
