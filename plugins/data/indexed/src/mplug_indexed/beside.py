"""Names of data sets, the tokenizer's record beside them, and the tokens that separate documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mplug import UsageError, local_prefix
from mplug_tokenization import load_tokenizer, read_tokenizer

if TYPE_CHECKING:
    from mplug_indexed.config import IndexedConfig
    from mplug_tokenization import TokenizerRecord


def prefix_of(name: Path | str) -> Path:
    """The prefix of a data set, from the prefix or one of its two files, which a store may have.

    Raises UsageError for an empty name.
    """
    path = local_prefix(str(name).removesuffix(".bin").removesuffix(".idx"))
    if path.name in ("", ".."):
        raise UsageError(
            f"'{name}' is not a data set; use the path of its files without .bin and .idx, such as data/corpus"
        )
    return path


def named_twice(prefixes: Sequence[Path | str]) -> Path | str | None:
    """The first data set that is named twice, compared by resolved path, or None."""
    seen = set[Path]()
    for prefix in prefixes:
        if (path := Path(prefix).resolve()) in seen:
            return prefix
        seen.add(path)
    return None


def tokenizer_of(prefixes: Sequence[Path], vocab_size: int | None) -> "TokenizerRecord | None":
    """The tokenizer's record that the data sets share; None if none of them has a record.

    Raises UsageError if two have different tokenizers, or if the model's vocabulary is smaller than the tokenizer's.
    """
    records = {prefix: record for prefix in prefixes if (record := read_tokenizer(prefix)) is not None}
    first = next(iter(records), None)
    if first is None:
        return None
    for prefix, record in records.items():
        if record.fingerprint != records[first].fingerprint:
            raise UsageError(
                f"'{first}' was made with tokenizer {_named(records[first])} and '{prefix}' with {_named(record)}, so "
                f"their token numbers differ in meaning; preprocess both with the same tokenizer"
            )
    size = records[first].vocab_size
    if vocab_size is not None and vocab_size < size:
        raise UsageError(
            f"'{first}' was made with a tokenizer of {size} tokens, and model.vocab_size={vocab_size} is smaller; set "
            f"model.vocab_size={size}, or the next multiple of 128"
        )
    return records[first]


def _named(record: "TokenizerRecord") -> str:
    return f"{record.name} ({record.fingerprint[:12]})"


MIDDLE = ("fim_prefix_token", "fim_middle_token", "fim_suffix_token")
NEEDING_EOD = ("eod_mask_loss", "reset_positions", "reset_attention")


@dataclass(frozen=True)
class Marks:
    """The tokens that end documents, and those that separate the three parts of a rearranged document."""

    eod: int | None
    middle: tuple[int, ...]
    """The tokens before a prefix, a middle and a suffix; empty if documents are not rearranged."""

    @property
    def named(self) -> list[tuple[str, int]]:
        """Each token with the name of its option."""
        eod = [] if self.eod is None else [("eod_token", self.eod)]
        return [*eod, *zip(MIDDLE, self.middle, strict=False)]


def marks_of(config: "IndexedConfig", record: "TokenizerRecord | None") -> Marks:
    """The tokens that the config names; the tokenizer's record supplies missing ones and the numbers of texts.

    Raises UsageError if a setting needs an unknown end of documents, or if a text is not a special token.
    """
    eod = config.eod_token if config.eod_token is not None or record is None else record.eod
    for name in NEEDING_EOD:
        if getattr(config, name) and eod is None:
            raise UsageError(
                f"data.{name}=true needs a token that ends documents, and no tokenizer's record beside the data names "
                f"one; set data.eod_token"
            )
    if not config.fim_rate:
        return Marks(eod, ())
    return Marks(eod, tuple(_number(f"data.{name}", getattr(config, name), record) for name in MIDDLE))


def _number(name: str, token: int | str, record: "TokenizerRecord | None") -> int:
    """The number of a token that is given as a number or as its text."""
    if isinstance(token, int):
        return token
    if record is None:
        raise UsageError(f"{name}={token}: there is no tokenizer's record beside the data; set {name} to a number")
    special: dict[str, int] = getattr(load_tokenizer(record), "special_tokens", {})
    if token not in special:
        tokens = f"it has {', '.join(special)}" if special else "it has none"
        raise UsageError(
            f"{name}={token} is not a special token of the data's tokenizer ({tokens}); use one of these, or a number"
        )
    return special[token]
