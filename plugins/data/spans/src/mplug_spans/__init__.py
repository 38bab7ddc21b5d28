"""Span corruption over the samples of another data plugin, for models with an encoder and a decoder."""

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from mplug import DOCUMENTS, ENCODER_TEXTS, LOSS_WEIGHTS, STREAMS, Source, UsageError, hookimpl
from mplug_spans.lengths import Lengths, longest

if TYPE_CHECKING:
    from mplug import Loader, Run, RunConfig

SENTINEL = "<extra_id_{}>"
"""The texts of T5's sentinels."""


class Spans:
    """Replaces spans of the samples of another data plugin by sentinels; the model learns to write the spans."""

    class Config(BaseModel):
        """The data, and how it is corrupted."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        of: Source = Field(description="the data plugin whose samples are corrupted: its name, and its fields")
        encoder_length: PositiveInt = Field(
            512, lt=1 << 20, description="tokens of the encoder; the samples of data.of are as long as this allows"
        )
        noise_density: float = Field(0.15, gt=0, lt=1, description="share of the tokens that the model must write")
        mean_span: float = Field(3.0, ge=1, description="mean number of tokens of a span")
        sentinels: PositiveInt = Field(
            100,
            description="tokens that may stand for a span, if the tokenizer has no tokens <extra_id_0>, ...: they "
            "follow the tokens of data.of, and the last one stands for the first span",
        )
        end_token: NonNegativeInt | None = Field(
            None, description="the token behind both texts; null: the tokenizer's end of a document"
        )
        start_token: NonNegativeInt = Field(
            0, description="the decoder's first token, and its padding; 0 is the padding of T5's tokenizer"
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @cached_property
    def lengths(self) -> Lengths:
        """The lengths of all samples; UsageError if none fit."""
        own = self.config
        found = longest(own.encoder_length, own.noise_density, own.mean_span)
        if found is None:
            raise UsageError(f"data.encoder_length={own.encoder_length} has no room for a sample; increase it")
        return found

    def _inside(self, config: "RunConfig") -> "RunConfig":
        """The config that the source sees: its samples have other lengths than those of the decoder."""
        trainer = config.trainer.model_copy(update={"seq_length": self.lengths.tokens})
        return replace(config, trainer=trainer)

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse what the source refuses, lengths that do not fit, and packed samples."""
        own, length = self.config, config.trainer.seq_length
        if length < self.lengths.decoder:
            raise UsageError(
                f"trainer.seq_length={length} is the length of the decoder, and the spans of data.encoder_length="
                f"{own.encoder_length}, noise_density={own.noise_density:g} and mean_span={own.mean_span:g} need "
                f"{self.lengths.decoder} tokens; set it to that or more"
            )
        inside = self._inside(config)
        own.of.call("configure", config=inside)
        taken = {DOCUMENTS, LOSS_WEIGHTS, STREAMS, *ENCODER_TEXTS}
        if entries := taken.intersection(own.of.call("batch_entries", config=inside) or ()):
            raise UsageError(
                f"{own.of.label} supplies '{min(entries)}', which data/spans cannot corrupt; change the settings of "
                f"data.of"
            )

    @hookimpl
    def check_data(self, config: "RunConfig") -> list[str]:
        """Refuse what the source refuses."""
        return self.config.of.call("check_data", config=self._inside(config)) or []

    @hookimpl
    def batch_entries(self) -> tuple[str, ...]:
        """The texts of the encoder."""
        return ENCODER_TEXTS

    @cached_property
    def tokenizer(self) -> Any:
        """The source's tokenizer; None if it has none."""
        return self.config.of.call("build_tokenizer")

    @hookimpl
    def build_tokenizer(self) -> Any:
        """The source's tokenizer."""
        return self.tokenizer

    @hookimpl
    def build_loader(self, run: "Run", split: Literal["train", "validation"]) -> "Loader":
        """The source's loader, with corrupted spans."""
        from mplug_spans.corruption import Corruption
        from mplug_spans.loader import SpansLoader

        own = self.config
        inner = own.of.call("build_loader", run=replace(run, config=self._inside(run.config)), split=split)
        sentinels, trainer = self._sentinels(inner.vocab_size), run.config.trainer
        corruption = Corruption(
            (trainer.seed, split),
            self.lengths,
            trainer.seq_length,
            sentinels=sentinels,
            end=self._end(),
            start=own.start_token,
        )
        highest = max(inner.vocab_size - 1, *sentinels, corruption.end, own.start_token)
        return SpansLoader(inner, corruption, highest + 1)

    def _sentinels(self, vocab_size: int) -> list[int]:
        """The sentinels, as many as spans, in the order of the spans."""
        number = self.lengths.spans
        special = dict(getattr(self.tokenizer, "special_tokens", None) or {})
        if SENTINEL.format(0) in special:
            found = [special[name] for one in range(number) if (name := SENTINEL.format(one)) in special]
            where = f"the tokenizer of {self.config.of.label} has"
        else:
            last = vocab_size + self.config.sentinels - 1
            found = list(range(last, max(last - number, vocab_size - 1), -1))
            where = "data.sentinels is"
        if len(found) < number:
            raise UsageError(
                f"a sample has {number} spans, and {where} {len(found)}; decrease data.encoder_length or "
                f"data.noise_density, or increase data.mean_span"
            )
        return found

    def _end(self) -> int:
        if self.config.end_token is not None:
            return self.config.end_token
        end: int | None = getattr(self.tokenizer, "eod", None)
        if end is None:
            raise UsageError(
                f"{self.config.of.label} has no tokenizer with an end of a document; set data.end_token to the number "
                f"of the token that ends a text"
            )
        return end
