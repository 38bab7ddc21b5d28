"""Local data sets of Hugging Face's library: texts, conversations and instructions, mapped or streamed."""

import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from mplug import MapLoader, UsageError, hookimpl
from mplug_datasets.config import DatasetsConfig
from mplug_tokenization import ChatLoader, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from mplug import Run, RunConfig
    from mplug_datasets.reading import Reader
    from mplug_datasets.rows import Reading
    from mplug_datasets.samples import SampleSet
    from mplug_datasets.sources import Source
    from mplug_tokenization.vocabulary import Vocabulary

log = logging.getLogger("mplug.datasets")
Split = Literal["train", "validation"]


class Datasets(ChatLoader):
    """Loads rows of JSONL, Parquet and Arrow files and of save_to_disk, as texts or as conversations."""

    Config = DatasetsConfig

    def __init__(self, config: DatasetsConfig) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse a wrong template or tokenizer, and too many documents per sample."""
        most, length = self.config.max_documents, config.trainer.seq_length
        if self.config.conversations and most > length:
            raise UsageError(
                f"data.max_documents={most} is more than trainer.seq_length={length} tokens can hold; set "
                f"data.max_documents to {length} or less"
            )
        assert self.tokenizer
        if self.config.conversations:
            assert self.template

    @hookimpl
    def check_data(self, config: "RunConfig") -> list[str]:
        """Refuse missing and unreadable files, and data without rows or without the form's columns."""
        from mplug_datasets.reading import check_source
        from mplug_datasets.store import cache_folder

        cache, sentences = cache_folder(self.config.cache), list[str]()
        for split in ("train", "validation") if config.trainer.eval_every else ("train",):
            reading = self._reading(split)
            if split == "validation" and reading.held_out is not None:
                continue  # the files of the training split
            sources, field = self._sources(split)
            for source in (source for group in sources for source in group):
                sentences += check_source(source, reading, cache, field)
        return sentences

    @hookimpl
    def batch_entries(self) -> tuple[str, ...]:
        """The lengths of conversations, which confine attention to one conversation."""
        return ("document_lengths",) if self.config.conversations else ()

    @cached_property
    def vocabulary(self) -> "Vocabulary":
        """The tokenizer's tokens; for conversations, also the template and its special tokens."""
        from mplug_tokenization.chat import ChatVocabulary
        from mplug_tokenization.vocabulary import Vocabulary

        special, tokenizer = self.config.special_tokens, load_tokenizer(self.tokenizer)
        if not self.config.conversations:
            return Vocabulary(tokenizer, special or ())
        return ChatVocabulary(tokenizer, self.template.special if special is None else special, self.template)

    @hookimpl
    def build_tokenizer(self) -> Tokenizer:
        """The tokenizer, which also encodes special tokens that a text spells out."""
        return self.vocabulary

    def _sources(self, split: str) -> "tuple[list[list[Source]], str]":
        """(the sources of each data set of a blend, the field that names them)."""
        from mplug_datasets.sources import find_source

        config = self.config
        own = split == "validation" and config.validation_path is not None
        given, field = (config.validation_path, "data.validation_path") if own else (config.path, "data.path")
        name = config.validation_split or config.split if split == "validation" else config.split
        one = [given] if isinstance(given, str) else given
        groups = [[path] for path in given] if isinstance(given, dict) else [one]
        if own:
            name = config.split
        return [[find_source(path, name, field) for path in group] for group in groups], field

    def _reading(self, split: str) -> "Reading":
        from mplug_datasets.rows import Reading

        config = self.config
        apart = config.validation_path is not None or config.validation_split is not None
        held_out = None if apart else split == "validation"
        return Reading(config.form, config.columns, held_out, config.validation_percent)

    def _reader(self, split: str, seq_length: int) -> "Reader":
        from mplug_datasets.reading import Reader
        from mplug_datasets.rows import ConversationEncoder, TextEncoder
        from mplug_datasets.store import cache_folder
        from mplug_tokenization.conversations import Encoder

        config = self.config
        encoder: TextEncoder | ConversationEncoder = TextEncoder(self.vocabulary.tokenizer)
        if config.conversations:
            own = Encoder(self.template, self.vocabulary, seq_length, config.too_long)
            encoder = ConversationEncoder(config.form, own)
        return Reader(self._reading(split), encoder, config.damaged == "refuse", cache_folder(config.cache))

    @hookimpl
    def build_loader(self, run: "Run", split: Split) -> MapLoader:
        """Map the split's encoded rows, or write them if this file system has none; or open its streams."""
        from mplug_datasets.samples import Blend

        groups, field = self._sources(split)
        keys = [(run.config.trainer.seed, number) for number in range(len(groups))]
        weights = [*self.config.path.values()] if isinstance(self.config.path, dict) and len(groups) > 1 else [1.0]
        settings: dict[str, Any] = {
            "vocab_size": self.vocabulary.vocab_size,
            "shard": run.mesh.batch_shard(run.rank),
            "micro_batch_size": run.micro_batch_size,
        }
        if self.config.streaming:
            from mplug_datasets.streams import StreamLoader

            streams = [self._stream(run, split, *pair) for pair in zip(groups, keys, strict=True)]
            return StreamLoader(streams, Blend(streams, weights), **settings)
        sets = [self._mapped(run, split, field, *pair) for pair in zip(groups, keys, strict=True)]
        found: SampleSet = sets[0] if len(sets) == 1 else Blend(sets, weights)
        return MapLoader(found.read, samples_per_epoch=found.count, fingerprint=found.fingerprint, **settings)

    def _stream(self, run: "Run", split: Split, group: "list[Source]", key: tuple[int, ...]) -> Any:
        from mplug_datasets.sources import joined
        from mplug_datasets.streams import Stream
        from mplug_tokenization.packed_samples import Documents

        trainer = run.config.trainer
        reader = self._reader(split, trainer.seq_length)

        def pack(documents: "list[Any]", own_key: tuple[int, ...]) -> Any:
            return self._pack(Documents(documents), trainer.seq_length, own_key)

        return Stream(joined(group), reader, self.config.block, pack, key, reports=run.rank == 0)

    def _mapped(self, run: "Run", split: Split, field: str, group: "list[Source]", key: tuple[int, ...]) -> Any:
        from mplug_datasets.rows import Tally
        from mplug_datasets.sources import joined
        from mplug_datasets.store import open_store

        trainer, source, tally = run.config.trainer, joined(group), Tally()
        reader = self._reader(split, trainer.seq_length)
        name = self._key(reader, source, trainer.seq_length)
        store, tally = open_store(reader.cache, name, reader.documents(source.files, tally), tally)
        samples = self._pack(store, trainer.seq_length, key)
        if not samples.count:
            reason = f"; the first damaged row: {tally.reason}" if tally.reason else ""
            remedy = ", set data.validation_path, or set trainer.eval_every=0" if split == "validation" else ""
            raise UsageError(
                f"{field} '{source.path}': no row of the {split} split can be used: of {tally.rows}, {tally.damaged} "
                f"are damaged ({tally.count}){reason}; use other data{remedy}"
            )
        if run.rank == 0:
            log.info(
                "%s: %d of %d rows of '%s' in %d samples (%s)",
                split, len(store.lengths), tally.rows, source.path, samples.count, tally.count,
            )  # fmt: skip
            for sentence in tally.sentences():
                log.warning("%s: '%s': %s", split, source.path, sentence)
        return samples

    def _pack(self, documents: Any, length: int, key: tuple[int, ...]) -> Any:
        """The samples of encoded documents."""
        from mplug_datasets.samples import TextSamples
        from mplug_tokenization.packed_samples import PackedSamples

        filler = self.vocabulary.tokenizer.eod or 0
        if self.config.conversations:
            return PackedSamples(documents, length, self.config.max_documents, filler, key)
        return TextSamples(documents, length, filler, key)

    def _key(self, reader: "Reader", source: "Source", seq_length: int) -> str:
        """The name of the encoded rows of a source: a hash of everything on which they depend."""
        from mplug_datasets.store import key_of

        config, of_form = self.config, None
        if config.conversations:
            template = self.template
            of_form = (template.source, sorted(template.variables.items()), sorted(self.vocabulary.special.items()))
            of_form = (*of_form, config.too_long, seq_length)
        reading = reader.reading
        parts = (
            config.form,
            sorted(config.columns.items()),
            reading.held_out,
            reading.percent,
            config.damaged,
            of_form,
        )
        return key_of(source.files, (self.tokenizer.fingerprint, self.tokenizer.version, *parts))
