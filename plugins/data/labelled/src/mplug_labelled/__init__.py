"""Texts with labels from JSON lines, packed to the sequence length."""

import logging
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mplug import MAY_MOVE, MapLoader, UsageError, hookimpl
from mplug_tokenization import TokenizerRecord, describe_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from mplug import Run, RunConfig

log = logging.getLogger("mplug.labelled")
Split = Literal["train", "validation"]
HEADS = {"texts": "sequences", "words": "tokens", "pairs": "embedding"}
"""Form of the lines -> the head of a model that learns from them (`model.head`)."""
OBJECTIVES = "objectives"
"""The section of what may have a head of its own."""
BEGINS, ENDS = ("[CLS]", "<s>"), ("[SEP]", "</s>")


class Labelled:
    """Packs texts with labels; tokens attend only within their own text."""

    class Config(BaseModel):
        """The lines, and how they become tokens."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        path: Annotated[str, MAY_MOVE] = Field(
            min_length=1, description="a file *.jsonl or *.jsonl.gz, a folder of such files, or a glob"
        )
        form: Literal["texts", "words", "pairs"] = Field(
            "texts",
            description="what a line has: 'text' and 'label'; 'words' and 'labels'; or 'anchor' and 'positive'",
        )
        validation_path: Annotated[str | None, MAY_MOVE] = Field(
            None, min_length=1, description="files for validation; null: validation_percent of `path`"
        )
        validation_percent: Annotated[float, MAY_MOVE] = Field(
            5, gt=0, le=50, description="percentage of the lines for validation, by a hash of their texts"
        )
        tokenizer: str = Field("bytes", description="name of an installed tokenizer plugin")
        tokenizer_options: dict[str, Any] = Field(default_factory=dict, description="options of the tokenizer")
        label_at: Literal["first", "last"] = Field(
            "first",
            description="of texts: the token that has the label; last: for a decoder with a head for classes "
            "(--objective classify)",
        )
        begin_token: int | str | None = Field(
            None,
            description="token before every text: its number, or the text of a special token; null: "
            f"{' or '.join(BEGINS)}, if the tokenizer has it",
        )
        end_token: int | str | None = Field(
            None, description=f"token behind every text, given like begin_token; null: {' or '.join(ENDS)}"
        )
        max_documents: int = Field(
            32, ge=3, description="maximum number of texts per sample; the unused end of a sample counts as one"
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @staticmethod
    def folder_settings(folder: "Path", tokenizer: str, options: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG004  # the host passes it
        """The tokenizer of the published checkpoint with which a run begins."""
        return {"tokenizer": tokenizer, "tokenizer_options": options}

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse a model with another head, and more texts than a sample can hold."""
        head, wanted = getattr(config.model, "head", None), HEADS[self.config.form]
        of_objective = self.config.form != "pairs" and self._names(config, OBJECTIVES)
        if self.config.label_at == "last" and not (of_objective and self.config.form == "texts"):
            raise UsageError(
                "data.label_at=last is for data.form=texts and a decoder with a head for classes; add --objective "
                "classify, or set data.label_at=first"
            )
        if head != wanted and not of_objective:
            has = f"model.head is '{head}'" if head else "the model has no such head"
            raise UsageError(f"data.form={self.config.form} is for model.head={wanted}, and {has}; change one of them")
        if self.config.max_documents > config.trainer.seq_length:
            raise UsageError(
                f"data.max_documents={self.config.max_documents} is more than trainer.seq_length="
                f"{config.trainer.seq_length} tokens can hold; set it to {config.trainer.seq_length} or less"
            )
        assert self.record.vocab_size

    @hookimpl
    def check_data(self, config: "RunConfig") -> None:
        """Refuse missing and unreadable files, and files whose first line has not the form."""
        from mplug_labelled.lines import check_files

        check_files(self.config.path, "data.path", self.config.form)
        if self.config.validation_path is not None and config.trainer.eval_every:
            check_files(self.config.validation_path, "data.validation_path", self.config.form)

    @hookimpl
    def batch_entries(self) -> tuple[str, ...]:
        """The lengths of texts, which confine attention to one text."""
        return ("document_lengths",)

    @cached_property
    def record(self) -> TokenizerRecord:
        """The tokenizer that the config names."""
        return describe_tokenizer(self.config.tokenizer, self.config.tokenizer_options, "data.tokenizer")

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, built once."""
        return load_tokenizer(self.record)

    @hookimpl
    def build_tokenizer(self) -> Any:
        """The tokenizer."""
        return self.tokenizer

    @hookimpl
    def build_loader(self, run: "Run", split: Split) -> MapLoader:
        """Read, encode and pack the split's lines in memory."""
        from mplug_labelled.encoding import Encoder
        from mplug_labelled.lines import of_split
        from mplug_labelled.samples import PackedTexts

        own, trainer = self.config, run.config.trainer
        names = self._names(run.config, OBJECTIVES) or self._names(run.config, "model")
        around = [self._special(field, usual) for field, usual in (("begin_token", BEGINS), ("end_token", ENDS))]
        encoder = Encoder(
            own.form, self.tokenizer, names, around[0], around[1], trainer.seq_length, own.label_at == "last"
        )
        lines = of_split(split, own.path, own.validation_path, own.validation_percent, own.form)
        items = [encoder.encode(line) for line in lines]
        if not items:
            where = f"data.path '{own.path}'" if split == "train" or not own.validation_path else own.validation_path
            remedy = ", set data.validation_path, or set trainer.eval_every=0" if split == "validation" else ""
            raise UsageError(f"{where}: the {split} split has no line; use more lines{remedy}")
        filler = getattr(self.tokenizer, "eod", None) or 0
        samples = PackedTexts(items, trainer.seq_length, own.max_documents, filler, trainer.seed)
        log.info("%s: %d lines in %d samples", split, len(items), samples.count)
        added = [1 + token for token in around if token is not None]
        return MapLoader(
            samples.read,
            vocab_size=max(self.tokenizer.vocab_size, len(names), *added, 1),
            shard=run.mesh.batch_shard(run.rank),
            micro_batch_size=run.micro_batch_size,
            samples_per_epoch=samples.count,
            fingerprint=samples.fingerprint,
        )

    @staticmethod
    def _names(config: "RunConfig", section: str) -> tuple[str, ...]:
        """The names of the classes, which the model or an objective states in its field `labels`."""
        stating = (one.config for one in config.chosen if one.section[0] == section)
        return tuple(name for one in stating for name in getattr(one, "labels", ()))

    def _special(self, field: str, usual: tuple[str, ...]) -> int | None:
        """The number of the token before or behind a text; None: there is none."""
        special, token = dict(getattr(self.tokenizer, "special_tokens", None) or {}), getattr(self.config, field)
        if token is None:
            return next((special[text] for text in usual if text in special), None)
        if isinstance(token, str) and token not in special:
            raise UsageError(f"data.{field}: '{token}' is no special token of the tokenizer; set its number")
        return special[token] if isinstance(token, str) else int(token)
