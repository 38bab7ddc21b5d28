"""The config of Energon."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mplug import MAY_CHANGE, distinct


class EnergonConfig(BaseModel):
    """Which data set, how samples become tokens, and how the set is divided and shuffled."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(
        min_length=1,
        description="a folder that `energon prepare` has indexed, or the YAML file of a metadataset (a blend)",
    )
    train_part: str = Field("train", description="the part of the data set for training")
    validation_part: str = Field("val", description="the part of the data set for validation")
    task_encoder: str = Field(
        "mplug_energon.encoders:Text", pattern=r"^[\w.]+:\w+$", description="module:Class of the task encoder"
    )
    task_encoder_options: dict[str, Any] = Field(default_factory=dict, description="arguments of the task encoder")
    entries: Annotated[tuple[str, ...], AfterValidator(distinct)] = Field(
        (),
        description="entries of the task encoder in addition to tokens, labels and positions, for models that accept "
        "them",
    )
    tokenizer: str = Field("bytes", description="name of an installed tokenizer plugin")
    tokenizer_options: dict[str, Any] = Field(default_factory=dict, description="options of the tokenizer")
    streams: int = Field(
        8,
        ge=1,
        description="number of parts of the data set that are read in parallel; a multiple of the data-parallel ranks",
    )
    num_workers: int = Field(
        0, ge=0, description="number of processes that read each stream; 0: the training process reads"
    )
    shuffle_buffer_size: int | None = Field(
        100,
        ge=2,
        description="number of samples per stream from which the next one is drawn; null: the order of the slices",
    )
    max_samples_per_sequence: int | None = Field(
        100,
        ge=1,
        description="maximum number of consecutive samples that stay together when slices are shuffled; null: a slice",
    )
    packing_buffer_size: int | None = Field(
        None,
        ge=2,
        description="number of samples from which a task encoder with `select_samples_to_pack` packs; null: no packing",
    )
    on_error: Annotated[Literal["stop", "skip"], MAY_CHANGE] = Field(
        "stop",
        description="if a sample cannot be read or encoded: stop ends the run, skip prints the error and continues",
    )
