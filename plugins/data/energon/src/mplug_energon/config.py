"""The config of Energon."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mplug import MAY_CHANGE


class EnergonConfig(BaseModel):
    """Which data set, how samples become tokens, and how the set is divided and shuffled."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(
        min_length=1, description="a folder that `energon prepare` has indexed, or a blend: a metadataset's YAML"
    )
    train_part: str = Field("train", description="the part of the data set for training")
    validation_part: str = Field("val", description="the part of the data set for validation")
    task_encoder: str = Field(
        "mplug_energon.encoders:Text", pattern=r"^[\w.]+:\w+$", description="module:Class of the task encoder"
    )
    task_encoder_options: dict[str, Any] = Field(default_factory=dict, description="what it is made with")
    entries: tuple[str, ...] = Field(
        (), description="entries that it gives beside tokens, labels and positions, for models that take them"
    )
    tokenizer: str = Field("bytes", description="tokenizer, an installed plugin")
    tokenizer_options: dict[str, Any] = Field(default_factory=dict, description="options of the tokenizer")
    streams: int = Field(8, ge=1, description="parts that are read side by side; data-parallel ranks must divide them")
    num_workers: int = Field(0, ge=0, description="processes that read each stream; 0: the training process does")
    shuffle_buffer_size: int | None = Field(
        100, ge=2, description="samples of a stream of which the next is drawn; null: in the order of slices"
    )
    max_samples_per_sequence: int | None = Field(
        100, ge=1, description="samples in a row that stay together when slices are shuffled; null: all of a slice"
    )
    packing_buffer_size: int | None = Field(
        None, ge=2, description="samples of which an encoder with `select_samples_to_pack` packs; null: none"
    )
    on_error: Annotated[Literal["stop", "skip"], MAY_CHANGE] = Field(
        "stop", description="what a sample does that cannot be read or encoded; skip tells of it in the output"
    )
