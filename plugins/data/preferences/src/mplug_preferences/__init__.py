"""Pairs of a chosen and a rejected answer: chat template, targets in the answers only, packing of whole pairs."""

import logging
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mplug import DOCUMENTS, MARGINS, MAY_MOVE, REFERENCE, SEQUENCES, MapLoader, UsageError, distinct, hookimpl
from mplug_tokenization import ChatLoader, Tokenizer

if TYPE_CHECKING:
    from mplug import Run, RunConfig
    from mplug_preferences.encoding import Count, Pair

log = logging.getLogger("mplug.preferences")
Split = Literal["train", "validation"]


class Preferences(ChatLoader):
    """Packs pairs of answers from JSON lines into samples; tokens attend only within their answer and its prompt."""

    class Config(BaseModel):
        """The pairs, how they become text, and how they are packed."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        path: Annotated[str, MAY_MOVE] = Field(
            min_length=1,
            description="a file *.jsonl or *.jsonl.gz, a folder of such files, or a glob; a line is a pair of answers",
        )
        validation_path: Annotated[str | None, MAY_MOVE] = Field(
            None,
            min_length=1,
            description="files of pairs for validation, given like `path`; null: validation_percent of `path`",
        )
        validation_percent: Annotated[float, MAY_MOVE] = Field(
            5, gt=0, le=50, description="percentage of the pairs for validation, by a hash of their prompts"
        )
        tokenizer: str = Field("bytes", description="name of an installed tokenizer plugin")
        tokenizer_options: dict[str, Any] = Field(default_factory=dict, description="options of the tokenizer")
        template: str = Field(
            "chatml",
            description="of messages: chatml, llama3, a Jinja file, a JSON file with 'chat_template', or the folder of "
            "a published checkpoint; a run that begins with such a folder uses the folder's tokenizer and template",
        )
        template_variables: dict[str, str] = Field(
            default_factory=dict,
            description="variables of a template file in addition to the messages, such as bos_token: '<s>'",
        )
        special_tokens: Annotated[list[str], AfterValidator(distinct)] | None = Field(
            None,
            description="texts that are encoded as one token each; null: those of the built-in template, of the JSON "
            "file, or of template_variables",
        )
        too_long: Literal["truncate", "drop"] = Field(
            "truncate", description="for pairs longer than trainer.seq_length: truncate both answers, or drop the pair"
        )
        max_pairs: int = Field(16, ge=1, description="maximum number of pairs per sample")
        reference: bool = Field(
            False,
            description="read the log-probabilities of both answers under a reference from each line "
            "(ref_chosen_logps, ref_rejected_logps)",
        )
        margin: bool = Field(
            False, description="read by how much the chosen answer is better from each line (margin), for reward models"
        )
        keep_end: bool = Field(
            False,
            description="keep the last token of each answer as an input, without a target: reward models score it",
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse a wrong template or tokenizer, and too many pairs per sample."""
        if 2 * self.config.max_pairs > config.trainer.seq_length:
            raise UsageError(
                f"data.max_pairs={self.config.max_pairs} is more than trainer.seq_length={config.trainer.seq_length} "
                f"tokens can hold; set data.max_pairs to {max(1, config.trainer.seq_length // 2)} or less"
            )
        assert self.template
        assert self.tokenizer

    @hookimpl
    def check_data(self, config: "RunConfig") -> None:
        """Refuse missing and unreadable files, and files whose first line is not a pair."""
        from mplug_preferences.lines import check_files

        check_files(self.config.path, "data.path", self._of_lines)
        if self.config.validation_path is not None and config.trainer.eval_every:
            check_files(self.config.validation_path, "data.validation_path", self._of_lines)

    @hookimpl
    def batch_entries(self) -> tuple[str, ...]:
        """The lengths of documents, the number of each position's answer, and the numbers that lines have."""
        return (DOCUMENTS, SEQUENCES, *self._of_lines)

    @property
    def _of_lines(self) -> tuple[str, ...]:
        """The entries with numbers that each line has beside its answers."""
        own = self.config
        return (*((REFERENCE,) if own.reference else ()), *((MARGINS,) if own.margin else ()))

    @hookimpl
    def build_tokenizer(self) -> Tokenizer:
        """The tokenizer: it also encodes special tokens that a text spells out, and writes and ends conversations.

        That of answers that are texts ends texts, and writes no conversation.
        """
        from mplug_preferences.lines import first_answer

        return self.vocabulary_for(first_answer(self.config.path))

    @hookimpl
    def build_loader(self, run: "Run", split: Split) -> MapLoader:
        """Read, render, encode and pack the split's pairs in memory."""
        from mplug_preferences.encoding import Count
        from mplug_preferences.samples import PairedSamples

        trainer, count, own = run.config.trainer, Count(), self.config
        pairs = self._pairs(split, trainer.seq_length, count)
        filler = self.vocabulary.tokenizer.eod or 0
        samples = PairedSamples(pairs, trainer.seq_length, own.max_pairs, filler, trainer.seed, self._of_lines)
        log.info(
            "%s: %d of %d pairs in %d samples, %.1f%% full (%s)",
            split, len(pairs), count.pairs, samples.count, 100 * samples.filled, count,
        )  # fmt: skip
        return MapLoader(
            samples.read,
            vocab_size=self.vocabulary.vocab_size,
            shard=run.mesh.batch_shard(run.rank),
            micro_batch_size=run.micro_batch_size,
            samples_per_epoch=samples.count,
            fingerprint=samples.fingerprint,
        )

    def _pairs(self, split: Split, length: int, count: "Count") -> "list[Pair]":
        from mplug_preferences.encoding import Encoder
        from mplug_preferences.lines import of_split

        config = self.config
        found = of_split(split, config.path, config.validation_path, config.validation_percent, self._of_lines)
        encoder = Encoder(self.template, self.vocabulary, length, config.too_long, config.keep_end)
        pairs = list(encoder.of(found, count))
        if not pairs:
            own_files = split == "validation" and config.validation_path
            where = f"data.validation_path '{config.validation_path}'" if own_files else f"data.path '{config.path}'"
            remedy = ", set data.validation_path, or set trainer.eval_every=0" if split == "validation" else ""
            raise UsageError(
                f"{where}: no pair of the {split} split can be used ({count.pairs} read; {count}); "
                f"use other pairs{remedy}"
            )
        return pairs
