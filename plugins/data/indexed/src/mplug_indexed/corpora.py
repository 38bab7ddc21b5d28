"""Operations on existing corpora: describe, sample, merge, verify, blend."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mplug import RunError, UsageError
from mplug_indexed.beside import named_twice, prefix_of
from mplug_indexed.failures import cannot_write, write_text
from mplug_indexed.format import CHUNK, bin_path, idx_path
from mplug_indexed.preprocess.job import checksum, report_path
from mplug_indexed.preprocess.report import read_report
from mplug_indexed.reader import Reader
from mplug_indexed.writer import Writer
from mplug_tokenization import TokenizerRecord, keep_tokenizer, load_tokenizer, read_tokenizer

UNKNOWN = "-"


@dataclass(frozen=True)
class Corpus:
    """A data set and its tokenizer's record, if one is stored beside it."""

    prefix: Path
    reader: Reader
    tokenizer: TokenizerRecord | None

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self.reader.document_indices) - 1

    @property
    def tokens(self) -> int:
        """The number of tokens, including ends of documents."""
        return int(self.reader.lengths.sum(dtype=np.int64))

    @property
    def row(self) -> tuple[str, ...]:
        """Its row in the table of corpora."""
        record, reader = self.tokenizer, self.reader
        of_tokenizer = (UNKNOWN,) * 3
        if record is not None:
            of_tokenizer = (record.name, f"{record.vocab_size:,}", UNKNOWN if record.eod is None else f"{record.eod:,}")
        counts = (self.documents, len(reader), self.tokens)
        return (
            str(self.prefix),
            *(f"{count:,}" for count in counts),
            reader.dtype.name,
            f"{reader.tokens.nbytes:,}",
            *of_tokenizer,
        )


def describe(prefix: Path | str) -> Corpus:
    """The corpus of a prefix. Raises UsageError if a file is missing or the index is damaged."""
    reader = Reader(prefix)
    reader.verify()
    return Corpus(Path(prefix), reader, read_tokenizer(prefix))


def sample(corpus: Corpus, first: int, count: int, characters: int) -> Iterator[tuple[int, str]]:
    """(number, beginning of the text) of documents; without a tokenizer, the text is the tokens' numbers."""
    if first >= max(corpus.documents, 1) and count:
        raise UsageError(
            f"--document {first}: '{corpus.prefix}' has {corpus.documents} documents, numbered from 0; use a smaller "
            f"number"
        )
    tokenizer = load_tokenizer(corpus.tokenizer) if corpus.tokenizer is not None and count else None
    reader, bounds = corpus.reader, corpus.reader.document_indices
    for number in range(first, min(first + count, corpus.documents)):
        tokens: list[int] = []
        for sequence in range(int(bounds[number]), int(bounds[number + 1])):
            length = int(reader.lengths[sequence])
            tokens += reader.read(sequence, 0, min(length, characters * 4 - len(tokens))).tolist()
            if len(tokens) >= characters * 4:
                break
        text = tokenizer.decode(tokens) if tokenizer is not None else " ".join(map(str, tokens))
        yield number, text if len(text) <= characters else f"{text[:characters]} ..."


def merge(prefixes: Sequence[str], output: Path, *, overwrite: bool) -> None:
    """Write several corpora as one, in order. Raises UsageError if their tokenizers or token dtypes differ."""
    if (bin_path(output).exists() or idx_path(output).exists()) and not overwrite:
        raise UsageError(f"'{output}' exists; use another --output, or add --overwrite to replace it")
    if output.resolve() in {Path(prefix).resolve() for prefix in prefixes}:
        raise UsageError(f"--output '{output}' is one of the merged corpora; use another --output")
    _refuse_twice(prefixes, "use it once, else the result has its documents twice")
    corpora = [describe(prefix) for prefix in prefixes]
    first, record = corpora[0], _one_tokenizer(corpora)
    for corpus in corpora:
        if corpus.reader.dtype != first.reader.dtype:
            raise UsageError(
                f"'{corpus.prefix}' has {corpus.reader.dtype.name} tokens, and '{first.prefix}' has "
                f"{first.reader.dtype.name} tokens; preprocess both with the same tokenizer"
            )
    try:
        with Writer(output, first.reader.dtype) as writer:
            for prefix in prefixes:
                writer.append(prefix)
            idx_path(output).unlink(missing_ok=True)  # an earlier corpus may have another tokenizer
            report_path(output).unlink(missing_ok=True)
            keep_tokenizer(record, output)
    except (OSError, RunError) as error:
        if not idx_path(output).exists():
            keep_tokenizer(None, output)  # do not leave a record without data
        raise (cannot_write(bin_path(output), error) if isinstance(error, OSError) else error) from None


def _refuse_twice(prefixes: Sequence[str], remedy: str) -> None:
    if (prefix := named_twice(prefixes)) is not None:
        raise UsageError(f"'{prefix}' is given twice; {remedy}")


def _one_tokenizer(corpora: Sequence[Corpus]) -> TokenizerRecord | None:
    first = corpora[0]
    for corpus in corpora[1:]:
        expected, found = first.tokenizer, corpus.tokenizer
        if (expected and expected.fingerprint) != (found and found.fingerprint):
            raise UsageError(
                f"'{first.prefix}' has {_named(expected)} and '{corpus.prefix}' has {_named(found)}, so their token "
                f"numbers differ in meaning; preprocess both with the same tokenizer"
            )
    return first.tokenizer


def _named(record: TokenizerRecord | None) -> str:
    return f"tokenizer {record.name} ({record.fingerprint[:12]})" if record is not None else "no tokenizer's record"


def verify(prefix: str, vocab_size: int | None) -> str:
    """Check a whole corpus; returns a summary of the checks. Raises RunError for damage."""
    for path in (bin_path(prefix), idx_path(prefix)):
        if not path.is_file():
            Reader(prefix)  # raises an error that names the missing file
    try:
        corpus = describe(prefix)
    except UsageError as error:
        raise RunError(str(error)) from None
    record = corpus.tokenizer
    checks = [f"the index of {corpus.documents:,} documents and {corpus.tokens:,} tokens is valid"]
    if record is not None:
        load_tokenizer(record)
        checks.append(f"tokenizer {record.name} is unchanged")
    size = vocab_size or (record.vocab_size if record is not None else None)
    if size is not None:
        _check_tokens(corpus, size)
        checks.append(f"every token is below {size:,}")
    if report_path(prefix).is_file():
        _compare_checksums(prefix)
        checks.append("checksums match the report")
    return "; ".join(checks)


def _check_tokens(corpus: Corpus, vocab_size: int) -> None:
    tokens = corpus.reader.tokens
    for start in range(0, len(tokens), CHUNK):
        piece = tokens[start : start + CHUNK]
        if int(piece.max()) >= vocab_size or int(piece.min()) < 0:
            wrong = (piece >= vocab_size) | (piece < 0)
            place = start + int(wrong.argmax())
            sequence = int(np.searchsorted(corpus.reader.pointers, place * tokens.itemsize, side="right")) - 1
            raise RunError(
                f"'{bin_path(corpus.prefix)}' has token {int(tokens[place])} in sequence {sequence}, and the "
                f"vocabulary has {vocab_size} tokens; it is damaged, or was made with another tokenizer; copy it, or "
                f"preprocess again"
            )


def _compare_checksums(prefix: str) -> None:
    try:
        recorded = read_report(report_path(prefix)).files
    except ValueError:
        raise RunError(
            f"'{report_path(prefix)}' is damaged: it has no checksums; copy it again, or remove it to skip this check"
        ) from None
    for path in (bin_path(prefix), idx_path(prefix)):
        if path.name not in recorded:
            raise RunError(
                f"'{report_path(prefix)}' has no checksum of '{path.name}': it belongs to another data set; copy the "
                f"right one, or remove it to skip this check"
            )
        if recorded[path.name].model_dump() != checksum(path):
            raise RunError(
                f"'{path}' is damaged: its size or sha256 differs from the report; copy it or preprocess again"
            )


@dataclass(frozen=True)
class Blend:
    """Corpora with their weights and their shares of the training's tokens."""

    corpora: Sequence[Corpus]
    weights: Sequence[float]
    shares: Sequence[float]
    tokens: int | None

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Its rows in the table of a blend."""
        rows = []
        for corpus, weight, share in zip(self.corpora, self.weights, self.shares, strict=True):
            usage = (UNKNOWN, UNKNOWN)
            if self.tokens is not None:
                tokens = share * self.tokens
                usage = (f"{tokens:,.0f}", f"{tokens / corpus.tokens:,.2f}")
            rows.append((str(corpus.prefix), f"{weight:g}", f"{share:.4f}", f"{corpus.tokens:,}", *usage))
        return rows

    def as_mapping(self) -> dict[str, Any]:
        """The section `data` of a config, and the model's vocabulary size if a tokenizer's record is known."""
        shares, record = zip(self.corpora, self.shares, strict=True), self.corpora[0].tokenizer
        paths = {str(corpus.prefix): float(f"{share:.6g}") for corpus, share in shares}
        model = {"model": {"vocab_size": record.vocab_size}} if record is not None else {}
        return {"data": {"name": "indexed", "path": paths}, **model}

    def write(self, path: Path) -> None:
        """Write `as_mapping` to a config file."""
        import yaml

        write_text(path, yaml.safe_dump(self.as_mapping(), sort_keys=False))


def blend(weighted: Sequence[str], tokens: int | None, *, by_size: bool) -> Blend:
    """Words like 'web=0.7' -> a blend. Weights are normalised, with `by_size` after multiplication by token counts."""
    corpora, weights = list[Corpus](), list[float]()
    for word in weighted:
        prefix, equals, number = word.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not equals or not 0 < weight < float("inf"):
            raise UsageError(f"'{word}': write it as PREFIX=WEIGHT with a weight above 0, such as web=0.7")
        corpora.append(describe(prefix_of(prefix)))
        if corpora[-1].tokens == 0:
            raise UsageError(f"'{prefix}' has no tokens, so it cannot have a share of the training; remove it")
        weights.append(weight)
    _refuse_twice([str(corpus.prefix) for corpus in corpora], "use it once, with the sum of its weights")
    _one_tokenizer(corpora)
    sizes = [weight * corpus.tokens if by_size else weight for weight, corpus in zip(weights, corpora, strict=True)]
    if not sum(sizes) < float("inf"):
        raise UsageError("the sum of the weights overflows; use smaller weights in the same proportions")
    return Blend(corpora, weights, [size / sum(sizes) for size in sizes], tokens)
