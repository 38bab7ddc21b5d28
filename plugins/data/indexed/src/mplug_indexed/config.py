"""The config of Indexed."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from mplug import MAY_CHANGE, MAY_MOVE


def _is_number(value: Any) -> bool:
    """Also as text: YAML takes '1e-3' for one."""
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, bool)


class IndexedConfig(BaseModel):
    """Which data sets, in which order, and what becomes of their tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Annotated[str | list[str] | dict[str, float], MAY_MOVE] = Field(
        description="a data set: the path of its two files without '.bin' and '.idx'; or several: a list mixes "
        "them by their sizes, each sample once an epoch, a mapping from paths to weights (above 0) by these"
    )
    split: str = Field("969,30,1", description="weights of training, validation and test among the sequences")
    samples: Annotated[Literal["run", "epoch"] | PositiveInt, MAY_CHANGE] = Field(
        "run",
        description="samples that the training order is drawn for. 'run': those of this run (trainer.steps times "
        "trainer.global_batch_size), which is Megatron's order; 'epoch': every epoch in an order of its own, "
        "whatever the run's length; a number: for a run that will be made longer",
    )
    extra_token: bool = Field(
        True, description="the last label of a sample is the token behind it; false: it has no target"
    )
    drop_last: bool = Field(True, description="leave out what is left of the validation tokens; false: pad it")
    cache: Annotated[str | None, MAY_CHANGE] = Field(
        None,
        min_length=1,
        description="folder for indices; null: 'index-cache' beside the data, else in the user's cache folder",
    )
    vocab_size: PositiveInt | None = Field(None, description="tokens are below it; null: the model's vocabulary")
    eod_token: NonNegativeInt | None = Field(
        None, description="the token that ends a document; null: the one of the tokenizer that made the data"
    )
    pad_token: NonNegativeInt | None = Field(
        None, description="the token of padding, never a target, read as token 0; null: no token is"
    )
    eod_mask_loss: bool = Field(False, description="no loss for what follows the end of a document")
    reset_positions: bool = Field(False, description="positions begin at 0 in every document")
    reset_attention: bool = Field(False, description="tokens attend within their own document only")
    max_documents: Annotated[PositiveInt | None, MAY_CHANGE] = Field(
        None,
        description="room for documents of a sample, with `reset_attention`; null: as many as sequences meet in "
        "one sample, up to the next power of two",
    )
    fim_rate: float = Field(
        0.0, ge=0, le=1, description="share of documents that are rearranged for filling in the middle"
    )
    fim_spm_rate: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of these in the order suffix, prefix, middle; else prefix, suffix, middle",
    )
    fim_prefix_token: NonNegativeInt | str | None = Field(
        None, description="the token before a prefix: its number, or the text of a special token of the tokenizer"
    )
    fim_middle_token: NonNegativeInt | str | None = Field(None, description="the token before a middle")
    fim_suffix_token: NonNegativeInt | str | None = Field(None, description="the token before a suffix")

    @field_validator("path", mode="before")
    @classmethod
    def _is_paths(cls, path: Any) -> Any:
        """One sentence on the whole, in place of one for each type that it may be of."""
        if isinstance(path, list) and any(isinstance(part, int | float) for part in path):
            raise ValueError("a list has paths alone; write weights as a mapping, {first: 0.7, second: 0.3}")
        names = [path] if isinstance(path, str) else [*path] if isinstance(path, list | dict) else [None]
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"must be a path, a list of paths or a mapping from paths to weights, not {path!r}")
        for name, weight in path.items() if isinstance(path, dict) else ():
            if not _is_number(weight):
                raise ValueError(f"gives '{name}' the weight {weight!r}; a weight is a number above 0")
        return path

    @model_validator(mode="after")
    def _tokens_are_named(self) -> Self:
        """What a setting needs to know must be there."""
        if self.fim_rate and None in (self.fim_prefix_token, self.fim_middle_token, self.fim_suffix_token):
            raise ValueError("fim_rate needs fim_prefix_token, fim_middle_token and fim_suffix_token")
        if not self.path:
            raise ValueError("path names no data set")
        for path, weight in self.path.items() if isinstance(self.path, dict) else ():
            if not 0 < weight < float("inf"):
                raise ValueError(f"path gives '{path}' the weight {weight:g}; weights are above 0, leave it out")
        if isinstance(self.path, dict) and not sum(self.path.values()) < float("inf"):
            raise ValueError("the weights of path add up to more than a number can be; take less, in proportion")
        return self
