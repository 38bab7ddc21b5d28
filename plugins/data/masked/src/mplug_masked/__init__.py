"""Masked language modelling over the samples of another data plugin."""

from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mplug import ENCODER_TEXTS, LOSS_WEIGHTS, STREAMS, Source, UsageError, hookimpl

if TYPE_CHECKING:
    from mplug import Loader, Run, RunConfig
    from mplug_masked.masks import Masks

USUAL = ("[MASK]", "<mask>")
"""Texts of the token that stands for masked ones; the first that is a special token of the tokenizer is used."""


class Masked:
    """Chooses tokens of the samples of another data plugin; the model learns to predict these."""

    class Config(BaseModel):
        """The data, and how its tokens are masked."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        of: Source = Field(description="the data plugin whose samples are masked: its name, and its fields")
        rate: float = Field(0.15, gt=0, le=1, description="probability with which a token is chosen")
        mask_share: float = Field(
            0.8, ge=0, le=1, description="share of the chosen tokens that the mask token replaces"
        )
        random_share: float = Field(
            0.1, ge=0, le=1, description="share of the chosen tokens that random tokens replace; the others stay"
        )
        mask_token: int | str | None = Field(
            None,
            description="the token that stands for masked ones: its number, or the text of a special token of the "
            f"tokenizer; null: {' or '.join(USUAL)}",
        )
        whole_words: bool = Field(
            False, description="choose words, as the tokenizer tells them, and all tokens of a chosen word"
        )
        kept_tokens: tuple[int | str, ...] = Field(
            (),
            description="tokens that are never chosen, beside the tokenizer's special tokens and its end of a document",
        )

        @model_validator(mode="after")
        def _shares_fit(self) -> Self:
            if self.mask_share + self.random_share > 1 + 1e-9:
                raise ValueError(
                    f"mask_share={self.mask_share} and random_share={self.random_share} add up to more than 1"
                )
            return self

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse what the source refuses, and a wrong mask token."""
        self.config.of.call("configure", config=config)
        if entries := {LOSS_WEIGHTS, STREAMS, *ENCODER_TEXTS}.intersection(self.batch_entries()):
            raise UsageError(
                f"{self.config.of.label} supplies '{min(entries)}', which belongs to next tokens, to media or to the "
                f"texts of an encoder, and which data/masked cannot mask; change the settings of data.of"
            )

    @hookimpl
    def check_data(self, config: "RunConfig") -> list[str]:
        """Refuse what the source refuses."""
        return self.config.of.call("check_data", config=config) or []

    @hookimpl
    def batch_entries(self) -> tuple[str, ...]:
        """Those of the source."""
        return tuple(self.config.of.call("batch_entries") or ())

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
        """The source's loader, with masks."""
        from mplug_masked.loader import MaskedLoader

        inner = self.config.of.call("build_loader", run=run, split=split)
        masks = self._masks(inner.vocab_size, run.config.trainer.seed, split)
        return MaskedLoader(inner, masks)

    def _masks(self, vocab_size: int, seed: int, split: str) -> "Masks":
        from mplug_masked.masks import Masks

        own = self.config
        special = dict(getattr(self.tokenizer, "special_tokens", None) or {})
        end = getattr(self.tokenizer, "eod", None)
        mask = self._mask_token(special)
        kept = {mask, *special.values(), *(self._number(token, special, "kept_tokens") for token in own.kept_tokens)}
        kept |= set() if end is None else {end}
        shares = own.rate, own.mask_share, own.random_share
        return Masks(
            (seed, split), *shares, mask=mask, vocab_size=vocab_size, kept=sorted(kept), continuing=self._continuing()
        )

    def _mask_token(self, special: dict[str, int]) -> int:
        if self.config.mask_token is not None:
            return self._number(self.config.mask_token, special, "mask_token")
        found = [special[text] for text in USUAL if text in special]
        if not found:
            raise UsageError(
                f"the tokenizer of {self.config.of.label} has no special token {' or '.join(USUAL)}; set "
                f"data.mask_token to the number of a token that occurs in no text"
            )
        return found[0]

    @staticmethod
    def _number(token: int | str, special: dict[str, int], field: str) -> int:
        if isinstance(token, int):
            return token
        if token not in special:
            raise UsageError(f"data.{field}: '{token}' is no special token of the tokenizer; set its number")
        return special[token]

    def _continuing(self) -> list[bool] | None:
        """For each token whether it continues a word; None if tokens are chosen one by one."""
        if not self.config.whole_words:
            return None
        found: list[bool] | None = getattr(self.tokenizer, "continuing", None)
        if found is None:
            raise UsageError(
                f"data.whole_words needs a tokenizer that tells where words begin (`continuing`), and that of "
                f"{self.config.of.label} does not; use another tokenizer, or set data.whole_words=false"
            )
        return found
