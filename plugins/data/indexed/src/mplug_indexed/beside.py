"""The tokenizer whose record stands beside data sets."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mplug import UsageError, read_tokenizer

if TYPE_CHECKING:
    from mplug import TokenizerRecord


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
