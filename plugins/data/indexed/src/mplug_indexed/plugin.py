"""Token corpora in Megatron's `.bin` and `.idx` files: memory-mapped, blended, and sampled in the same order."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mplug import Loader, UsageError, hookimpl
from mplug_indexed.beside import Marks, marks_of, named_twice, prefix_of, tokenizer_of
from mplug_indexed.config import IndexedConfig
from mplug_tokenization import CorpusTokenizer, load_tokenizer

if TYPE_CHECKING:
    from mplug import Run, RunConfig
    from mplug_indexed.indices import Cut
    from mplug_indexed.order import Order
    from mplug_indexed.reader import Reader
    from mplug_indexed.samples import Treatment

SPLITS = ("train", "validation")
LARGEST_SEED = 2**32 - 1


class Indexed:
    """Loads samples of Megatron's indexed data sets, in Megatron's order."""

    Config = IndexedConfig

    def __init__(self, config: Config) -> None:
        self.config = config

    @cached_property
    def prefixes(self) -> list[Path]:
        """The data sets' paths, without '.bin' and '.idx'."""
        paths = [self.config.path] if isinstance(self.config.path, str) else [*self.config.path]
        return [prefix_of(path) for path in paths]

    @cached_property
    def weights(self) -> list[float] | None:
        """The data sets' weights, or None."""
        return [*self.config.path.values()] if isinstance(self.config.path, dict) else None

    @cached_property
    def readers(self) -> "list[Reader]":
        """The opened data sets; raises UsageError if one does not hold integers."""
        from mplug_indexed.reader import Reader

        readers = [Reader(prefix) for prefix in self.prefixes]
        for reader in readers:
            if reader.dtype.kind not in "iu":
                raise UsageError(f"'{reader.prefix}' contains {reader.dtype} numbers; use a data set of integer tokens")
        return readers

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse settings that are wrong for every content of the files."""
        if config.trainer.seed > LARGEST_SEED:
            raise UsageError(f"trainer.seed={config.trainer.seed} is too large for data/indexed; use a seed below 2^32")
        if self.config.samples == "epoch" and self.weights is not None:
            raise UsageError("data.samples=epoch does not support weights in data.path; use a number, or 'run'")
        self._refuse_twice()
        for split in self._splits(config):
            self._share(split)

    @hookimpl
    def check_data(self, config: "RunConfig") -> list[str]:
        """Refuse damaged files, splits without tokens, and tokens outside the vocabulary; report repeated splits."""
        from mplug_indexed.order import Part

        self._refuse_tokens_outside(config)
        sentences = []
        for split in self._splits(config):
            cut = self._cut(config, split)
            for reader in self.readers:
                sentences += Part(reader, self._sequences(reader, split)).repeated(cut, split)
        return sentences

    def _refuse_tokens_outside(self, config: "RunConfig") -> None:
        """Raise UsageError if a tokenizer beside the data, or a token of the config, has no place in the vocabulary."""
        vocab_size = self.config.vocab_size or getattr(config.model, "vocab_size", None)
        tokenizer_of(self.prefixes, vocab_size)
        for name, token in self.marks.named:
            if vocab_size is not None and token >= vocab_size:
                raise UsageError(
                    f"data.{name}={token} is not in the vocabulary of {vocab_size} tokens; use the number that the "
                    f"data's tokenizer has for it ('mplug data inspect' shows that of the end of a document)"
                )

    def _splits(self, config: "RunConfig") -> tuple[str, ...]:
        """The splits that a run reads."""
        return SPLITS if config.trainer.eval_every else SPLITS[:1]

    @cached_property
    def marks(self) -> Marks:
        """The tokens that end documents and that separate the parts of a rearranged document."""
        return marks_of(self.config, tokenizer_of(self.prefixes, None))

    def _refuse_twice(self) -> None:
        if (prefix := named_twice(self.prefixes)) is not None:
            weights = "" if self.weights is None else ", with the sum of its weights"
            raise UsageError(f"data.path has '{prefix}' twice; use it once{weights}")

    def _share(self, split: str) -> tuple[float, float]:
        """The part of the sequences that `data.split` gives to a split; raises UsageError if it is empty."""
        from mplug_indexed.indices import parse_split

        part = parse_split(self.config.split)[SPLITS.index(split)]
        if part is None:
            raise UsageError(
                f"data.split '{self.config.split}' has no share for {split}; set one above 0{_remedy(split)}"
            )
        return part

    def _sequences(self, reader: "Reader", split: str) -> range:
        """The sequences of a data set in a split; raises UsageError if there are none."""
        from mplug_indexed.indices import sequences_of

        part = self._share(split)
        if not len(reader):
            raise UsageError(f"'{reader.prefix}' has no documents; remove it, or preprocess its texts again")
        found = sequences_of(part, len(reader))
        if not found:
            raise UsageError(
                f"'{reader.prefix}' has {len(reader)} sequences, and data.split '{self.config.split}' assigns none of "
                f"them to {split}; set a larger share{_remedy(split)}"
            )
        return found

    @hookimpl
    def batch_entries(self) -> tuple[str, ...]:
        """Document lengths, if attention is confined to documents."""
        return ("document_lengths",) if self.config.reset_attention else ()

    @hookimpl
    def build_tokenizer(self) -> CorpusTokenizer | None:
        """The tokenizer whose record is stored beside the data, or None."""
        record = tokenizer_of(self.prefixes, None)
        return load_tokenizer(record) if record is not None else None

    @hookimpl
    def build_loader(self, run: "Run", split: Literal["train", "validation"]) -> Loader:
        """Map the split's indices from the cache, or build them if this file system has none."""
        from mplug_indexed.samples import IndexedLoader, Samples

        self._refuse_tokens_outside(run.config)
        order = self._order(run, split)
        samples = Samples(order, self._treatment(run, split))
        order.round(0)
        loader = IndexedLoader(samples, shard=run.mesh.batch_shard(run.rank), micro_batch_size=run.micro_batch_size)
        record = tokenizer_of(self.prefixes, None)
        loader.tokenizer = record and record.as_mapping()
        return loader

    def _order(self, run: "Run", split: str) -> "Order":
        from mplug_indexed.cache import Cache, choose_folder
        from mplug_indexed.order import Order, Part

        trainer, samples = run.config.trainer, self.config.samples
        count: int | None = trainer.steps * trainer.global_batch_size
        if split == "validation":
            count = trainer.eval_samples
        elif samples != "run":
            count = None if samples == "epoch" else samples
        return Order(
            parts=[Part(reader, self._sequences(reader, split)) for reader in self.readers],
            weights=self.weights,
            cut=self._cut(run.config, split),
            seed=trainer.seed,
            samples=count,
            cache=Cache(choose_folder(self.config.cache, self.prefixes[0])),
        )

    def _cut(self, config: "RunConfig", split: str) -> "Cut":
        from mplug_indexed.indices import Cut

        keep_rest = split == "validation" and not self.config.drop_last
        return Cut(config.trainer.seq_length, int(self.config.extra_token), keep_rest)

    def _treatment(self, run: "Run", split: str) -> "Treatment":
        from mplug.tensors.random import key_of
        from mplug_indexed.samples import Middle, Treatment

        config, middle = self.config, None
        if config.fim_rate:
            key = key_of(run.config.trainer.seed, "fill in the middle", split)
            middle = Middle(config.fim_rate, config.fim_spm_rate, *self.marks.middle, key)
        return Treatment(
            vocab_size=config.vocab_size or run.config.model.vocab_size,
            eod=self.marks.eod,
            padding=config.pad_token,
            mask_eod=config.eod_mask_loss,
            reset_positions=config.reset_positions,
            max_documents=self._room(run) if config.reset_attention else None,
            middle=middle,
        )

    def _room(self, run: "Run") -> int:
        """M, the room for documents, common to both splits because all micro batches of a run have the same shape."""
        if self.config.max_documents is not None:
            return self.config.max_documents
        most = max(self._order(run, split).most_pieces() for split in self._splits(run.config))
        return min(1 << most.bit_length(), run.config.trainer.seq_length)


def _remedy(split: str) -> str:
    return ", or set trainer.eval_every=0" if split == "validation" else ""
