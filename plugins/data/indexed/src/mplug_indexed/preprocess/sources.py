"""Finds the files of documents and their formats, and splits them into chunks, each read by one process."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mplug import UsageError

FORMATS = ("jsonl", "parquet", "text")
SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".txt": "text",
    ".md": "text",
}
COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True)
class Source:
    """A file of documents, as it was at the start of the job."""

    path: str
    format: str
    size: int
    modified: int
    """Modification time in nanoseconds; it and the size reveal a file that has changed."""

    @property
    def compression(self) -> str:
        """'.gz', '.zst' or the empty string."""
        suffix = Path(self.path).suffix.lower()
        return suffix if suffix in COMPRESSED else ""

    def as_mapping(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Chunk:
    """The input of one task: lines that begin in a range of bytes, row groups of a table, or whole files.

    Chunks are in the order of documents. They depend only on the sources and the chunk size.
    """

    number: int
    sources: tuple[Source, ...]
    start: int
    stop: int
    """Range of bytes or of row groups; 0 to the size if whole files are read."""
    size: int
    """Bytes of input, for the progress bar."""

    @property
    def source(self) -> Source:
        """The file of a chunk that has only one."""
        return self.sources[0]


def find_sources(inputs: Iterable[str], form: str | None, pattern: str | None) -> list[Source]:
    """The files of inputs; an input is a file, or a folder with its sorted files. Raises UsageError if there are none.

    `form` is a format, or None to infer it from a file's suffix. `pattern` selects files in folders.
    """
    found: dict[str, Source] = {}
    for name in inputs:
        path = Path(name).expanduser()
        files = _files_of(path, form, pattern) if path.is_dir() else [path]
        if not files:
            kind = f"that matches '{pattern}'" if pattern else f"with one of the suffixes {', '.join(SUFFIXES)}"
            raise UsageError(f"'{name}' contains no file {kind}; select files with --pattern and --format")
        for file in files:
            source = _source(file, form)
            if source.path in found:
                raise UsageError(f"'{file}' is given twice; use it once, else the corpus has its documents twice")
            found[source.path] = source
    return list(found.values())


def _files_of(folder: Path, form: str | None, pattern: str | None) -> list[Path]:
    try:
        files = sorted(path for path in folder.glob(pattern or "**/*") if path.is_file())
    except (ValueError, NotImplementedError) as error:
        raise UsageError(f"--pattern '{pattern}' is not a valid glob: {error}; use one such as '**/*.txt'") from None
    if pattern or form == "text":
        return files
    return [path for path in files if _format_of(path) is not None]


def _format_of(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return SUFFIXES.get(suffixes[-1]) if suffixes else None


def _source(path: Path, form: str | None) -> Source:
    file_format = form or _format_of(path)
    if file_format is None:
        raise UsageError(f"'{path}' has none of the suffixes {', '.join(SUFFIXES)}; set --format")
    if file_format == "parquet" and path.suffix.lower() in COMPRESSED:
        raise UsageError(f"'{path}' is a compressed Parquet file, and Parquet compresses its content; decompress it")
    try:
        status = path.stat()
        if not path.is_file():
            raise UsageError(f"'{path}' is neither a file nor a folder; use one of these as input")
        with path.open("rb"):
            pass
    except OSError as error:
        raise UsageError(f"cannot read '{path}': {error.strerror}; use a readable file") from None
    return Source(str(path.resolve()), file_format, status.st_size, status.st_mtime_ns)


def cut(sources: Iterable[Source], chunk_size: int) -> Iterator[Chunk]:
    """The chunks of all sources, in the order of their documents."""
    number, texts = 0, list[Source]()
    for source in sources:
        if texts and (source.format != "text" or sum(text.size for text in texts) >= chunk_size):
            yield _whole(number, texts)
            number, texts = number + 1, []
        if source.format == "text":
            texts.append(source)
            continue
        for chunk in _cut_one(number, source, chunk_size):
            yield chunk
            number += 1
    if texts:
        yield _whole(number, texts)


def _whole(number: int, sources: list[Source]) -> Chunk:
    size = sum(source.size for source in sources)
    return Chunk(number, tuple(sources), 0, size, size)


def _cut_one(number: int, source: Source, chunk_size: int) -> Iterator[Chunk]:
    if source.format == "parquet":
        yield from _row_groups(number, source, chunk_size)
    elif source.compression:  # a start in the middle would unpack everything before it
        yield _whole(number, [source])
    else:
        for start in range(0, source.size, chunk_size):
            stop = min(start + chunk_size, source.size)
            yield Chunk(number, (source,), start, stop, stop - start)
            number += 1


def _row_groups(number: int, source: Source, chunk_size: int) -> Iterator[Chunk]:
    from mplug_indexed.preprocess.parquet import open_parquet

    with open_parquet(source.path) as table:
        sizes = [table.metadata.row_group(group).total_byte_size for group in range(table.num_row_groups)]
    begin, total = 0, 0
    for group, size in enumerate(sizes):
        total += size
        if total >= chunk_size or group == len(sizes) - 1:
            share = source.size * (group + 1) // len(sizes) - source.size * begin // len(sizes)
            yield Chunk(number, (source,), begin, group + 1, share)
            number, begin, total = number + 1, group + 1, 0
