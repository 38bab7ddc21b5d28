"""The config of Indexed."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from mplug import MAY_CHANGE, MAY_MOVE


def _is_number(value: Any) -> bool:
    """Whether a value is a number, or the text of a number: YAML reads '1e-3' as text."""
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, bool)


class IndexedConfig(BaseModel):
    """The data sets, the order of their samples, and the treatment of their tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Annotated[str | list[str] | dict[str, float], MAY_MOVE] = Field(
        description="prefix of a data set: the path of its files without '.bin' and '.idx'; a list of prefixes mixes "
        "data sets by size, each sample once per epoch; a mapping from prefixes to weights above 0 mixes them by weight"
    )
    split: str = Field("969,30,1", description="shares of the sequences for training, validation and test")
    samples: Annotated[Literal["run", "epoch"] | PositiveInt, MAY_CHANGE] = Field(
        "run",
        description="number of samples for which the training order is drawn; 'run': those of this run (trainer.steps "
        "times trainer.global_batch_size), as in Megatron; 'epoch': a new order for each epoch, independent of the "
        "length of the run; a number: for a run that will be extended later",
    )
    extra_token: bool = Field(
        True, description="the last label of a sample is the token after it; false: the last position has no target"
    )
    drop_last: bool = Field(
        True, description="drop the last validation tokens if they do not fill a sample; false: pad them to a sample"
    )
    cache: Annotated[str | None, MAY_CHANGE] = Field(
        None,
        min_length=1,
        description="folder for the cache of indices; null: 'index-cache' beside the data or, if that cannot be "
        "written, a folder in the user's cache",
    )
    vocab_size: PositiveInt | None = Field(None, description="number of tokens in the vocabulary; null: the model's")
    eod_token: NonNegativeInt | None = Field(
        None, description="token that ends a document; null: that of the tokenizer that made the data"
    )
    pad_token: NonNegativeInt | None = Field(
        None, description="padding token, which is never a target and is read as token 0; null: no token is padding"
    )
    eod_mask_loss: bool = Field(False, description="no loss for the token that follows the end of a document")
    reset_positions: bool = Field(False, description="restart positions at 0 in each document")
    reset_attention: bool = Field(False, description="tokens attend only to tokens of their own document")
    max_documents: Annotated[PositiveInt | None, MAY_CHANGE] = Field(
        None,
        description="with `reset_attention`, the maximum number of documents per sample; null: the power of two above "
        "the largest number of sequences in a sample",
    )
    fim_rate: float = Field(
        0.0, ge=0, le=1, description="share of the documents that are rearranged for fill-in-the-middle training"
    )
    fim_spm_rate: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of the rearranged documents in the order suffix, prefix, middle; the others have the order "
        "prefix, suffix, middle",
    )
    fim_prefix_token: NonNegativeInt | str | None = Field(
        None, description="token before a prefix: its number, or the text of a special token of the tokenizer"
    )
    fim_middle_token: NonNegativeInt | str | None = Field(None, description="token before a middle, in the same form")
    fim_suffix_token: NonNegativeInt | str | None = Field(None, description="token before a suffix, in the same form")

    @field_validator("path", mode="before")
    @classmethod
    def _is_paths(cls, path: Any) -> Any:
        """Refuse a wrong path with one message; pydantic would give one for each type of the union."""
        if isinstance(path, list) and any(isinstance(part, int | float) for part in path):
            raise ValueError("a list has only paths; write weights as a mapping such as {first: 0.7, second: 0.3}")
        names = [path] if isinstance(path, str) else [*path] if isinstance(path, list | dict) else [None]
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"must be a path, a list of paths or a mapping from paths to weights, not {path!r}")
        for name, weight in path.items() if isinstance(path, dict) else ():
            if not _is_number(weight):
                raise ValueError(f"'{name}' has the weight {weight!r}; use a number above 0")
        return path

    @model_validator(mode="after")
    def _tokens_are_named(self) -> Self:
        """Refuse settings without the tokens that they need, and a path without data sets or with wrong weights."""
        if self.fim_rate and None in (self.fim_prefix_token, self.fim_middle_token, self.fim_suffix_token):
            raise ValueError("fim_rate needs fim_prefix_token, fim_middle_token and fim_suffix_token; set all three")
        if not self.path:
            raise ValueError("path is empty; set it to a data set")
        for path, weight in self.path.items() if isinstance(self.path, dict) else ():
            if not 0 < weight < float("inf"):
                raise ValueError(f"path: '{path}' has the weight {weight:g}; use a finite weight above 0, or remove it")
        if isinstance(self.path, dict) and not sum(self.path.values()) < float("inf"):
            raise ValueError("the sum of the weights in path overflows; use smaller weights in the same proportions")
        return self
