"""Names the tar and the file of a sample in every error, also in worker processes.

If a task encoder fails, Energon passes the sample's sources to its error handler. If a tar cannot be read, there is no
sample yet, and the reader raises without calling the handler. So this file wraps the readers of a data set, before
worker processes copy them.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from traceback import walk_tb
from typing import Any

from megatron.energon import SavableDataset
from megatron.energon.errors import SkipSample
from megatron.energon.flavors.webdataset.itar_reader import ITarReader

from mplug import RunError, UsageError

SHOWN = 300
"""Maximum characters of a library's exception in a message."""


def message_of(error: BaseException) -> str:
    """A library's exception on one line; if it has no message, its cause."""
    cause = error.__cause__ or error.__context__
    words = " ".join(str(error).split())
    if not words and cause is not None:
        return message_of(cause)
    return f"{type(error).__name__}: {words}"[:SHOWN].removesuffix(": ")


def where(sample: Any, sources: Any = None) -> str:
    """The tars and files of a sample, or its key; the empty string if it has neither."""
    tars = [(f"{source.dataset_path}/{source.shard_name}", source.file_names) for source in sources or ()]
    found = [", ".join(f"'{name}'" for name in (tar, *files)) for tar, files in tars]
    key = getattr(sample, "__key__", None) or (sample.get("__key__") if isinstance(sample, dict) else None)
    return "; ".join(found) or (f"sample '{key}'" if key is not None else "")


def name_tars(dataset: Any, path: str) -> None:
    """Wrap every reader of a data set, so that its errors name the tar and the file."""
    for reader in readers(dataset):
        reader._get_item_by_sample_pointer = partial(_read, reader._get_item_by_sample_pointer, reader, path)


def readers(dataset: Any) -> list[ITarReader[Any]]:
    """Every tar reader inside a data set, once."""
    found: list[ITarReader[Any]] = []
    seen: set[int] = set()
    pending = [dataset]
    while pending:
        part = pending.pop()
        if id(part) not in seen:
            seen.add(id(part))
            found += [part] if isinstance(part, ITarReader) else []
            pending += [] if isinstance(part, ITarReader) else _parts(part)
    return found


def _parts(whole: Any) -> Iterable[Any]:
    """The parts of a data set, a container or an object of Energon that may contain readers."""
    if isinstance(whole, list | tuple):
        return whole
    if isinstance(whole, dict):
        return whole.values()
    module = type(whole).__module__
    inner = isinstance(whole, SavableDataset) or module.startswith("megatron.energon.")
    return vars(whole).values() if inner and hasattr(whole, "__dict__") else ()


def _read(
    read: Callable[..., Any], reader: "ITarReader[Any]", path: str, pointer: Any, *arguments: Any, **named: Any
) -> Any:
    try:
        return read(pointer, *arguments, **named)
    except (UsageError, RunError, SkipSample):
        raise
    except Exception as error:  # what tarfile, the file system and Energon raise
        tar = reader.tar_filepaths[pointer.tar_file_id]
        file = next((f", file '{name}'," for name in _files(error)), "")
        raise UsageError(
            f"data.path '{path}' cannot be read: tar '{tar}'{file} at byte {pointer.byte_offset}: {message_of(error)}; "
            f"it is damaged or has changed since it was prepared; download it again, or run 'energon prepare' again"
        ) from error


def _files(error: Exception) -> Iterator[str]:
    """The file that Energon's reader was reading when it raised, from the traceback."""
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code.co_name == "_get_item_by_sample_pointer" and "fname" in frame.f_locals:
            yield frame.f_locals["fname"]
