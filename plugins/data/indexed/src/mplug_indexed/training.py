"""Trains a byte-level BPE tokenizer on a corpus."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mplug import UsageError
from mplug_indexed.failures import cannot_write
from mplug_indexed.preprocess.documents import Texts
from mplug_indexed.preprocess.sources import Source, cut

CHUNK = 4 << 20


@dataclass
class Trained:
    """The result: vocabulary, number of documents, special tokens."""

    vocab_size: int = 0
    documents: int = 0
    special: dict[str, int] = field(default_factory=dict)
    """Special tokens and their numbers."""


def train(
    sources: Sequence[Source],
    output: Path,
    vocab_size: int,
    special: Sequence[str],
    key: str,
    mib: float | None,
    *,
    overwrite: bool,
) -> Trained:
    """Write a tokenizer.json for the plugin tokenizers/huggingface. Raises UsageError if nothing can be learnt.

    With `mib`, evenly spaced chunks of the input are read, so that they represent all of it. Bad lines are skipped;
    preprocessing reports them.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise UsageError("the library tokenizers is not installed; pip install tokenizers") from None
    if output.exists() and not overwrite:
        raise UsageError(f"'{output}' exists; use another --output, or add --overwrite to replace it")
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + len(special)
    if vocab_size < least:
        raise UsageError(f"--vocab-size {vocab_size} is too small for bytes and special tokens; use {least} or more")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    for number, token in enumerate(special):
        if token in special[:number]:
            raise UsageError(f"--special '{token}' is given twice; name each special token once")
        if len(token) < 2:  # a token of one character may stand for a byte
            raise UsageError(
                f"--special '{token}' is too short to be distinguished from text; use a word such as <|endoftext|>"
            )
    trained = Trained()
    tokenizer.train_from_iterator(_texts(sources, key, mib, trained), trainer)
    if trained.documents == 0:
        raise UsageError(
            f"the inputs have no document with a text in '{key}'; use other inputs, or correct --key or --format"
        )
    trained.vocab_size = tokenizer.get_vocab_size()
    trained.special = {token: tokenizer.token_to_id(token) for token in special}
    temporary = output.with_name(f".{output.name}.tmp")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(temporary))
        temporary.replace(output)
    except Exception as error:  # the library raises Exception itself
        with suppress(OSError):  # the folder itself may be unusable
            temporary.unlink(missing_ok=True)
        raise _unwritten(output, error) from None
    return trained


def _unwritten(output: Path, error: Exception) -> Exception:
    """The error to raise. The library reports the system's error only as text: '... (os error 28)'."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    number = getattr(error, "errno", None) or (int(found[1]) if found else None)
    return cannot_write(output, OSError(number, os.strerror(number)) if number else OSError(str(error)))


def _texts(sources: Sequence[Source], key: str, mib: float | None, trained: Trained) -> Iterator[str]:
    chunks = list(cut(sources, CHUNK if mib is None else min(CHUNK, max(int(mib * (1 << 20)) // 8, 1 << 16))))
    total, limit = sum(chunk.size for chunk in chunks), float("inf") if mib is None else mib * (1 << 20)
    step = max(1, int(total // limit)) if limit < total else 1
    read = 0
    for chunk in chunks[::step]:
        for text in Texts(chunk, key):
            if read >= limit:
                return
            if text:
                read += len(text)
                trained.documents += 1
                yield text
