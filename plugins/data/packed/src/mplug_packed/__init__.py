"""Supervised fine-tuning on conversations: chat template, loss on answers only, packing to the sequence length."""

import logging
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mplug import MAY_MOVE, MapLoader, UsageError, distinct, hookimpl
from mplug_tokenization import ChatLoader, Tokenizer

if TYPE_CHECKING:
    from mplug import Run, RunConfig
    from mplug_tokenization.conversations import Count
    from mplug_tokenization.packed_samples import Documents

log = logging.getLogger("mplug.packed")
Split = Literal["train", "validation"]


class Packed(ChatLoader):
    """Packs conversations from JSON lines into samples; tokens attend only within their own conversation."""

    class Config(BaseModel):
        """The conversations, how they become text, and how they are packed."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        path: Annotated[str, MAY_MOVE] = Field(
            min_length=1,
            description="a file *.jsonl or *.jsonl.gz, a folder of such files, or a glob; a line is one conversation",
        )
        validation_path: Annotated[str | None, MAY_MOVE] = Field(
            None,
            min_length=1,
            description="files of conversations for validation, given like `path`; null: validation_percent of `path`",
        )
        validation_percent: Annotated[float, MAY_MOVE] = Field(
            5, gt=0, le=50, description="percentage of the conversations for validation, by a hash of their messages"
        )
        tokenizer: str = Field("bytes", description="name of an installed tokenizer plugin")
        tokenizer_options: dict[str, Any] = Field(default_factory=dict, description="options of the tokenizer")
        template: str = Field(
            "chatml",
            description="chatml, llama3, a Jinja file, a JSON file with 'chat_template', or the folder of a published "
            "checkpoint; a run that begins with such a folder uses the folder's tokenizer and template",
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
            "truncate", description="for conversations longer than trainer.seq_length: truncate or drop them"
        )
        max_documents: int = Field(
            32,
            ge=2,
            description="maximum number of documents per sample; the unused end of a sample counts as a document",
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse a wrong template or tokenizer, and too many documents per sample."""
        if self.config.max_documents > config.trainer.seq_length:
            raise UsageError(
                f"data.max_documents={self.config.max_documents} is more than "
                f"trainer.seq_length={config.trainer.seq_length} tokens can hold; set data.max_documents to "
                f"{config.trainer.seq_length} or less"
            )
        assert self.template
        assert self.tokenizer

    @hookimpl
    def check_data(self, config: "RunConfig") -> None:
        """Refuse missing and unreadable files, and files whose first line is not a conversation."""
        from mplug_packed.conversations import check_files

        check_files(self.config.path, "data.path")
        if self.config.validation_path is not None and config.trainer.eval_every:
            check_files(self.config.validation_path, "data.validation_path")

    @hookimpl
    def batch_entries(self) -> tuple[str, ...]:
        """The lengths of documents, which confine attention to one document."""
        return ("document_lengths",)

    @hookimpl
    def build_tokenizer(self) -> Tokenizer:
        """The tokenizer: it also encodes special tokens that a text spells out, and writes and ends conversations."""
        return self.vocabulary

    @hookimpl
    def build_loader(self, run: "Run", split: Split) -> MapLoader:
        """Read, render, encode and pack the split's conversations in memory."""
        from mplug_tokenization.conversations import Count
        from mplug_tokenization.packed_samples import PackedSamples

        trainer, count = run.config.trainer, Count()
        documents = self._documents(split, trainer.seq_length, count)
        filler = self.vocabulary.tokenizer.eod or 0
        samples = PackedSamples(documents, trainer.seq_length, self.config.max_documents, filler, (trainer.seed,))
        log.info(
            "%s: %d of %d conversations in %d samples, %.1f%% full (%s)",
            split, count.kept, count.conversations, samples.count, 100 * samples.filled, count,
        )  # fmt: skip
        return MapLoader(
            samples.read,
            vocab_size=self.vocabulary.vocab_size,
            shard=run.mesh.batch_shard(run.rank),
            micro_batch_size=run.micro_batch_size,
            samples_per_epoch=samples.count,
            fingerprint=samples.fingerprint,
            documents=samples.documents_of,
        )

    def _documents(self, split: Split, length: int, count: "Count") -> "Documents":
        from mplug_packed.reading import encoded, of_split
        from mplug_tokenization.conversations import Encoder
        from mplug_tokenization.packed_samples import Documents, document
        from mplug_tokenization.templates import ANSWERS

        config = self.config
        found = of_split(split, config.path, config.validation_path, config.validation_percent)
        kept = encoded(found, Encoder(self.template, self.vocabulary, length, config.too_long), count)
        documents = Documents(document(conversation, length) for conversation in kept)
        if not documents.lengths:
            own_files = split == "validation" and config.validation_path
            where = f"data.validation_path '{config.validation_path}'" if own_files else f"data.path '{config.path}'"
            remedy = ", set data.validation_path, or set trainer.eval_every=0" if split == "validation" else ""
            raise UsageError(
                f"{where}: no conversation of the {split} split can be used: of {count.conversations}, "
                f"{count.too_long} are too long, {count.without_answer} have no answer (a message of the role "
                f"'{ANSWERS}') in the first {length} tokens, {count.with_special_tokens} have the text of a special "
                f"token in a message; use other conversations{remedy}"
            )
        return documents
