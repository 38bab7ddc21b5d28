"""The whole preprocessing job: processes encode chunks in any order; parts are joined in the documents' order.

During the work, the folder `corpus.parts/` beside `corpus.bin` holds a manifest, which identifies the job, and the
completed parts. The same job, run again, continues from there.
"""

import fcntl
import hashlib
import json
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from mplug import RunError, UsageError
from mplug_indexed.failures import cannot_write
from mplug_indexed.format import bin_path, dtype_for, idx_path
from mplug_indexed.preprocess.parts import (
    Encoder,
    Part,
    Work,
    encode_chunk,
    part_prefix,
    read_part,
    start_worker,
    write_json,
)
from mplug_indexed.preprocess.sources import Chunk, Source, cut
from mplug_indexed.writer import Writer
from mplug_tokenization import TokenizerRecord, keep_tokenizer

MOST_REPORTED = 100
"""Maximum number of bad lines that the report of a data set names."""


@dataclass(frozen=True)
class Job:
    """The settings of a job. `chunk_size` is in bytes; neither it nor `workers` changes the data."""

    prefix: Path
    sources: list[Source]
    tokenizer: TokenizerRecord
    key: str = "text"
    append_eod: bool = False
    bad_lines: str = "stop"
    chunk_size: int = 16 << 20
    workers: int = 1
    overwrite: bool = False

    @property
    def folder(self) -> Path:
        """The folder of the parts."""
        return Path(f"{self.prefix}.parts")

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that determine the parts; only a job with the same identity can reuse them."""
        return {
            "format": 1,
            "inputs": [source.as_mapping() for source in self.sources],
            "tokenizer": self.tokenizer.fingerprint,
            "key": self.key,
            "append_eod": self.append_eod,
            "chunk_size": self.chunk_size,
        }


@dataclass
class Outcome:
    """The result of a job."""

    documents: int = 0
    tokens: int = 0
    empty: int = 0
    num_bad: int = 0
    bad: list[str] = field(default_factory=list)
    """Sentences of the first bad lines: 'texts.jsonl:17 is not JSON: ...'."""
    resumed: int = 0
    """Number of parts that an earlier run of the same job made."""


Progress = Callable[[Outcome, int], None]
"""(outcome so far, bytes of input processed); called after every part."""


def report_path(prefix: Path | str) -> Path:
    """The path of a data set's report: its inputs, and the checksums of its files."""
    return Path(f"{prefix}.preprocess.json")


def preprocess(job: Job, progress: Progress | None = None) -> Outcome:
    """Run the job, or the rest of it. On a UsageError or RunError, completed parts stay for the next run."""
    if job.append_eod and job.tokenizer.eod is None:
        raise UsageError(
            f"--append-eod: tokenizer '{job.tokenizer.name}' has no token that ends a document; set one in its "
            f"options, or remove --append-eod"
        )
    with _claimed(job):
        try:
            outcome, finished = _encoded(job, progress)
        except UsageError:
            parts = job.folder.glob("*.bin")
            if all(part.stat().st_size == 0 for part in parts):  # for example a wrong --key: nothing to keep
                shutil.rmtree(job.folder, ignore_errors=True)
            raise
        _refuse_changed(job.sources)
        _join(job, finished, outcome)
    shutil.rmtree(job.folder, ignore_errors=True)
    return outcome


def _encoded(job: Job, progress: Progress | None) -> tuple[Outcome, list[Chunk]]:
    """Complete the part of every chunk; returns their total outcome and the chunks in order."""
    outcome, chunks = Outcome(), list(cut(job.sources, job.chunk_size))
    lines, done, finished = dict[str, int](), 0, list[Chunk]()
    with ExitStack() as stack:
        for chunk, part in stack.enter_context(_closing(_parts(job, chunks, outcome))):
            _note_bad(job, outcome, chunk, part, lines)
            outcome.documents += part.documents
            outcome.tokens += part.tokens
            outcome.empty += part.empty
            done += chunk.size
            finished.append(chunk)
            if progress is not None:
                progress(outcome, done)
    if outcome.documents == 0:
        raise UsageError(
            f"the inputs have no valid document: {outcome.empty} are empty, {outcome.num_bad} are invalid"
            f"{f' (the first: {outcome.bad[0]})' if outcome.bad else ''}; use other inputs, or correct --key or "
            f"--format"
        )
    return outcome, finished


@contextmanager
def _closing(parts: Iterator[tuple[Chunk, Part]]) -> Iterator[Iterator[tuple[Chunk, Part]]]:
    try:
        yield parts
    finally:
        parts.close()  # type: ignore[attr-defined]


@contextmanager
def _claimed(job: Job) -> Iterator[None]:
    """Within this context, the folder of parts belongs to this process and holds only parts of this job."""
    manifest = job.folder / "manifest.json"
    try:
        existing = [path for path in (bin_path(job.prefix), idx_path(job.prefix)) if path.exists()]
        if existing and not job.overwrite and not manifest.exists():
            raise UsageError(f"'{existing[0]}' exists; use another --output, or add --overwrite to replace it")
        job.folder.mkdir(parents=True, exist_ok=True)
        with (job.folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"another process is writing '{job.prefix}'; wait for it, or stop it") from None
            _begin(job, manifest)
            yield
    except OSError as error:
        raise cannot_write(job.prefix, error) from None


def _begin(job: Job, manifest: Path) -> None:
    identity = job.identity
    try:
        found = json.loads(manifest.read_text(encoding="utf-8"))
    except FileNotFoundError:
        found = None
    except ValueError:
        found = {}
    found = found if isinstance(found, dict) or found is None else {}
    if found is not None and found != identity:
        if not job.overwrite and any(path.suffix == ".json" and path != manifest for path in job.folder.iterdir()):
            different = [name for name in identity if found.get(name) != identity[name]]
            state = f"with different {' and '.join(different)}" if found else "with a damaged manifest"
            raise UsageError(
                f"'{job.folder}' has parts of an unfinished job {state}; finish that job, use another --output, or add "
                f"--overwrite to start again"
            )
        manifest.unlink()
        found = None
    for path in job.folder.iterdir():
        if path.name.endswith((".tmp", ".partial")) or (found is None and path.name != "lock"):
            path.unlink()
    if found is None:
        write_json(manifest, identity)


def _parts(job: Job, chunks: list[Chunk], outcome: Outcome) -> Iterator[tuple[Chunk, Part]]:
    """Every chunk with its part, in order; existing parts are reused."""
    work = Work(str(job.folder), job.key, job.append_eod, dtype_for(job.tokenizer.vocab_size).str, job.tokenizer)
    existing = {chunk.number: part for chunk in chunks if (part := read_part(job.folder, chunk.number)) is not None}
    outcome.resumed = len(existing)
    missing = [chunk for chunk in chunks if chunk.number not in existing]
    if job.workers == 1 or len(missing) < 2:
        encoder = Encoder(work) if missing else None
        for chunk in chunks:
            part = existing.get(chunk.number)
            if part is None:
                assert encoder is not None
                part = encoder.encode(chunk)
            yield chunk, part
        return
    yield from _in_processes(work, min(job.workers, len(missing)), chunks, existing)


def _in_processes(
    work: Work, workers: int, chunks: list[Chunk], existing: dict[int, Part]
) -> Iterator[tuple[Chunk, Part]]:
    context = get_context("forkserver")
    context.set_forkserver_preload(["mplug_indexed.preprocess.parts"])
    pool = ProcessPoolExecutor(workers, context, initializer=start_worker, initargs=(work,))
    missing = iter(chunk for chunk in chunks if chunk.number not in existing)
    waiting: deque[tuple[int, Future[Part]]] = deque()

    def submit(count: int) -> None:
        waiting.extend((chunk.number, pool.submit(encode_chunk, chunk)) for chunk in islice(missing, count))

    try:
        submit(3 * workers)  # keeps workers busy while this process yields results
        for chunk in chunks:
            if chunk.number in existing:
                yield chunk, existing[chunk.number]
                continue
            number, future = waiting.popleft()
            assert number == chunk.number
            part = future.result()
            submit(1)
            yield chunk, part
    except BrokenProcessPool:
        raise RunError(
            "an encoding process died (killed, or out of memory); run the same command to continue, with fewer "
            "--workers if memory is short"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _note_bad(job: Job, outcome: Outcome, chunk: Chunk, part: Part, lines: dict[str, int]) -> None:
    """Count a part's bad lines, and report their locations in the files."""
    before = lines.get(chunk.source.path, 0)
    if part.num_bad:
        outcome.num_bad += part.num_bad
        room = MOST_REPORTED - len(outcome.bad)
        of_a_file = chunk.source.format != "text"
        outcome.bad += [
            f"{bad.path}{f':{before + bad.line}' if of_a_file else ''} {bad.reason}" for bad in part.bad[: max(room, 0)]
        ]
        if job.bad_lines == "stop":
            raise UsageError(f"{outcome.bad[0]}; correct it, or skip invalid documents with --bad-lines skip")
    lines[chunk.source.path] = before + part.lines


def _refuse_changed(sources: list[Source]) -> None:
    for source in sources:
        try:
            status = Path(source.path).stat()
        except OSError as error:
            raise UsageError(
                f"'{source.path}' can no longer be read: {error.strerror}; restore it and run the same command again"
            ) from None
        if (status.st_size, status.st_mtime_ns) != (source.size, source.modified):
            raise UsageError(f"'{source.path}' has changed while it was read; start again with --overwrite")


def _join(job: Job, chunks: list[Chunk], outcome: Outcome) -> None:
    """Join all parts into one data set; write the tokenizer's record before it, and the report after it.

    The data set is written in the folder of parts and then moved, so that a kill leaves no incomplete files.
    """
    dtype, whole = dtype_for(job.tokenizer.vocab_size), job.folder / "whole"
    with Writer(whole, dtype) as writer:
        for chunk in chunks:
            writer.append(part_prefix(job.folder, chunk.number))
    idx_path(job.prefix).unlink(missing_ok=True)  # an earlier data set may have another tokenizer
    keep_tokenizer(job.tokenizer, job.prefix)
    for path in (bin_path, idx_path):
        path(whole).replace(path(job.prefix))
    files = {path.name: checksum(path) for path in (bin_path(job.prefix), idx_path(job.prefix))}
    report = {**asdict(outcome), **job.identity, "dtype": np.dtype(dtype).name, "files": files}
    report.pop("resumed")
    write_json(report_path(job.prefix), report)


def checksum(path: Path) -> dict[str, Any]:
    """Size in bytes and sha256 of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
