"""Data sets by their names, the tokenizer whose record stands beside them, and the tokens that part documents."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mplug import UsageError, load_tokenizer, read_tokenizer

if TYPE_CHECKING:
    from mplug import TokenizerRecord
    from mplug_indexed.config import IndexedConfig


def prefix_of(given: Path | str) -> Path:
    """What the names of a data set's files begin with, also where one of them is given; UsageError where nothing is."""
    path = Path(os.path.expanduser(str(given).removesuffix(".bin").removesuffix(".idx")))
    if path.name in ("", ".."):
        raise UsageError(f"'{given}' names no data set; a name is what its .bin and .idx begin with, as in data/corpus")
    return path


def named_twice(prefixes: Sequence[Path | str]) -> Path | str | None:
    """The first data set that is named again, also by another way to its files; None where none is."""
    seen = set[Path]()
    for prefix in prefixes:
        if (path := Path(prefix).resolve()) in seen:
            return prefix
        seen.add(path)
    return None


def tokenizer_of(prefixes: Sequence[Path], vocab_size: int | None) -> "TokenizerRecord | None":
    """The record beside all of the data sets that have one; None where none has.

    UsageError where two were made by different tokenizers, or where a model's vocabulary does not hold their tokens.
    """
    records = {prefix: record for prefix in prefixes if (record := read_tokenizer(prefix)) is not None}
    first = next(iter(records), None)
    if first is None:
        return None
    for prefix, record in records.items():
        if record.fingerprint != records[first].fingerprint:
            raise UsageError(
                f"'{first}' was made with tokenizer {_named(records[first])} and '{prefix}' with {_named(record)}: a "
                f"token of one is another word of the other; preprocess them with one tokenizer"
            )
    size = records[first].vocab_size
    if vocab_size is not None and vocab_size < size:
        raise UsageError(
            f"'{first}' was made with a tokenizer of {size} tokens, and model.vocab_size={vocab_size} holds fewer; set "
            f"model.vocab_size={size}, or a little more to have a multiple of 128"
        )
    return records[first]


def _named(record: "TokenizerRecord") -> str:
    return f"{record.name} ({record.fingerprint[:12]})"


MIDDLE = ("fim_prefix_token", "fim_middle_token", "fim_suffix_token")
NEEDING_EOD = ("eod_mask_loss", "reset_positions", "reset_attention")


@dataclass(frozen=True)
class Marks:
    """Tokens that stand between documents, and between the three parts of one."""

    eod: int | None
    middle: tuple[int, ...]
    """Before a prefix, a middle, a suffix; none where documents stay as they are."""

    @property
    def named(self) -> list[tuple[str, int]]:
        """Each token with the name of its option."""
        eod = [] if self.eod is None else [("eod_token", self.eod)]
        return [*eod, *zip(MIDDLE, self.middle, strict=False)]


def marks_of(config: "IndexedConfig", record: "TokenizerRecord | None") -> Marks:
    """What the config names; what it does not, or names by its text, the tokenizer's record tells.

    UsageError where a setting needs the end of a document and nothing tells it, or where a text is no special token.
    """
    eod = config.eod_token if config.eod_token is not None or record is None else record.eod
    for name in NEEDING_EOD:
        if getattr(config, name) and eod is None:
            raise UsageError(f"data.{name} needs data.eod_token: no tokenizer beside the data tells how documents end")
    if not config.fim_rate:
        return Marks(eod, ())
    return Marks(eod, tuple(_number(f"data.{name}", getattr(config, name), record) for name in MIDDLE))


def _number(name: str, token: int | str, record: "TokenizerRecord | None") -> int:
    """The number of a token that is named by it, or by its text."""
    if isinstance(token, int):
        return token
    if record is None:
        raise UsageError(f"{name}={token}: no tokenizer's record stands beside the data; name the token by its number")
    special: dict[str, int] = getattr(load_tokenizer(record), "special_tokens", {})
    if token not in special:
        known = f"it has {', '.join(special)}" if special else "it has none"
        raise UsageError(f"{name}={token} is no special token of the data's tokenizer ({known}); or give a number")
    return special[token]
