"""The config of Datasets."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator

from mplug import MAY_CHANGE, MAY_MOVE, distinct

Form = Literal["text", "chat", "prompt", "alpaca"]
COLUMNS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "text": (("text",), ()),
    "chat": (("messages",), ("tools",)),
    "prompt": (("prompt", "completion"), ("system",)),
    "alpaca": (("instruction", "output"), ("input", "system")),
}
"""Form -> the columns that it needs, and those that it reads if they exist."""


class DatasetsConfig(BaseModel):
    """The data sets, the form of their rows, and how rows become samples."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Annotated[str | list[str] | dict[str, float], MAY_MOVE] = Field(
        description="a file (.jsonl, .json, .parquet, .arrow; JSON also with .gz), a folder of such files, a folder of "
        "save_to_disk, or a glob; a list reads all of them as one data set; a mapping from paths to weights above 0 "
        "mixes their samples by weight",
    )
    split: str = Field("train", min_length=1, description="name of the training split in a folder that has splits")
    validation_split: str | None = Field(
        None, min_length=1, description="name of the split of `path` for validation, such as 'test'; null: none"
    )
    validation_path: Annotated[str | list[str] | None, MAY_MOVE] = Field(
        None, min_length=1, description="data for validation, given like `path`; null: validation_percent of `path`"
    )
    validation_percent: float = Field(
        5, gt=0, le=50, description="percentage of the rows for validation, by a hash of their columns"
    )
    form: Form = Field(
        "text",
        description="text: documents for continued pretraining; chat: a column of messages; prompt: the columns prompt "
        "and completion; alpaca: instruction, input and output. The last three use the chat template",
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="names of columns that differ from those of the form, such as text: content",
    )
    streaming: bool = Field(
        False,
        description="encode rows while the run reads them; false: encode all rows once into `cache`, and map them",
    )
    block: PositiveInt = Field(
        1000, description="with `streaming`, the number of documents that are shuffled and packed together"
    )
    cache: Annotated[str | None, MAY_CHANGE] = Field(
        None, min_length=1, description="folder for encoded rows; null: a folder in the user's cache"
    )
    tokenizer: str = Field("bytes", description="name of an installed tokenizer plugin")
    tokenizer_options: dict[str, Any] = Field(default_factory=dict, description="options of the tokenizer")
    template: str = Field(
        "chatml",
        description="chatml, llama3, a Jinja file, a JSON file with 'chat_template', or the folder of a published "
        "checkpoint; a run that begins with such a folder uses the folder's tokenizer and template",
    )
    template_variables: dict[str, str] = Field(
        default_factory=dict, description="variables of a template file in addition to the messages"
    )
    special_tokens: Annotated[list[str], AfterValidator(distinct)] | None = Field(
        None, description="texts that are encoded as one token each; null: those of the template"
    )
    too_long: Literal["truncate", "drop"] = Field(
        "truncate", description="for conversations longer than trainer.seq_length: truncate or drop them"
    )
    max_documents: int = Field(
        32,
        ge=2,
        description="maximum number of conversations per sample plus one for its unused end; texts are not limited",
    )
    damaged: Literal["skip", "refuse"] = Field(
        "skip", description="for rows that do not have the form: skip and count them, or refuse the run"
    )

    @property
    def conversations(self) -> bool:
        """Whether rows become conversations with a mask of targets."""
        return self.form != "text"

    @field_validator("path", mode="before")
    @classmethod
    def _is_paths(cls, path: Any) -> Any:
        """Refuse a wrong path with one message; pydantic would give one for each type of the union."""
        names = [path] if isinstance(path, str) else [*path] if isinstance(path, list | dict) else [None]
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ValueError(f"must be a path, a list of paths or a mapping from paths to weights, not {path!r}")
        distinct(names)
        for name, weight in path.items() if isinstance(path, dict) else ():
            if not _weight(weight):
                raise ValueError(f"'{name}' has the weight {weight!r}; use a number above 0")
        return path

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        """Refuse two sources of validation rows, and names of columns that the form does not have."""
        if self.validation_path is not None and self.validation_split is not None:
            raise ValueError("validation_path and validation_split are both set; remove one")
        allowed = [name for names in COLUMNS[self.form] for name in names]
        for name in self.columns:
            if name not in allowed:
                raise ValueError(f"columns: '{name}' is no column of form {self.form}; use {', '.join(allowed)}")
        return self


def _weight(value: Any) -> bool:
    """Whether a value is a finite weight above 0, or the text of one: YAML reads '1e-3' as text."""
    try:
        return not isinstance(value, bool) and 0 < float(value) < float("inf")
    except (TypeError, ValueError):
        return False
