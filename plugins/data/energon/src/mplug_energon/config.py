"""The config of Energon."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat

from mplug import DOCUMENTS, LOSS_WEIGHTS, MAY_CHANGE, STREAMS, distinct, local_path

CONVERSATIONS = "conversations"
OF_CONVERSATIONS = (
    "template_variables", "special_tokens", "sample_weights", "picture_mark", "max_pixels", "video_fps", "max_rows",
    "too_long", "max_documents",
)  # fmt: skip
"""The fields that only the task encoder of conversations uses, except the template, which a folder may supply."""


class EnergonConfig(BaseModel):
    """Which data set, how samples become tokens, and how the set is divided and shuffled."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(
        min_length=1,
        description="a folder that `energon prepare` has indexed (or its address in a store), or the YAML file of a "
        "metadataset (a blend)",
    )
    train_part: str = Field("train", description="the part of the data set for training")
    validation_part: str = Field("val", description="the part of the data set for validation")
    task_encoder: str = Field(
        "text",
        pattern=r"^([\w-]+|[\w.]+:\w+)$",
        description="text, image-text, conversations, or module:Class of your own task encoder",
    )
    task_encoder_options: dict[str, Any] = Field(default_factory=dict, description="arguments of the task encoder")
    template: str = Field(
        "chatml",
        description="of conversations: chatml, llama3, a Jinja file, a JSON file with 'chat_template', or the folder "
        "of a published checkpoint; a run that begins with such a folder uses the folder's tokenizer and template",
    )
    template_variables: dict[str, str] = Field(
        default_factory=dict,
        description="of conversations: variables of a template file in addition to the messages, such as bos_token",
    )
    special_tokens: Annotated[list[str], AfterValidator(distinct)] | None = Field(
        None, description="of conversations: texts that are encoded as one token each; null: those of the template"
    )
    sample_weights: bool = Field(
        False,
        description="of conversations: multiply the losses of a conversation by its 'weight', without which it is 1; "
        "false: conversations with another weight than 1 cannot be used",
    )
    picture_mark: str | None = Field(
        "<image>",
        min_length=1,
        description="of conversations: the text that stands for the next picture in content that is text; null: none",
    )
    max_pixels: int = Field(
        1 << 27, ge=1, description="of conversations: largest number of pixels of a picture file, by its header"
    )
    video_fps: PositiveFloat | None = Field(
        None,
        allow_inf_nan=False,
        description="of conversations: frames in a second of a video whose part of a message has no 'fps'; null: such "
        "a video cannot be used",
    )
    max_rows: int | None = Field(
        None,
        ge=1,
        description="of conversations: largest number of rows of the model's streams (patches) in a sample; null: only "
        "trainer.seq_length bounds a sample",
    )
    too_long: Literal["truncate", "refuse"] = Field(
        "truncate",
        description="of conversations with more tokens or rows than a sample: keep the beginning, or data.on_error",
    )
    max_documents: int = Field(
        32,
        ge=2,
        description="of conversations: largest number of documents in a packed sample; its unused end is one of them",
    )
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
        description="if a sample cannot be read or encoded: stop ends the run, skip logs and counts it, and continues",
    )

    @property
    def folder(self) -> Path:
        """The data set on this machine."""
        return local_path(self.path)

    @property
    def has_conversations(self) -> bool:
        """Whether the task encoder is that of conversations."""
        return self.task_encoder == CONVERSATIONS

    @property
    def all_entries(self) -> tuple[str, ...]:
        """The entries of micro batches in addition to tokens, labels and positions."""
        if not self.has_conversations:
            return self.entries
        packed, weighted = self.packing_buffer_size is not None, self.sample_weights
        given = {DOCUMENTS: packed, LOSS_WEIGHTS: weighted, STREAMS: True}
        return tuple(name for name, is_given in given.items() if is_given)
