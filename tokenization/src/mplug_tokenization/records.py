"""Tokenizers by name, and the record of the tokenizer that made a corpus. Imports no torch.

The record `corpus.tokenizer.json` is next to the data `corpus.bin`. It states the tokenizer that made the data, its
options, and a fingerprint of its files. Copies of these files are in the same folder.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, overload

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from mplug.config.entry import Entry
from mplug.errors import UsageError
from mplug.registry.bind_section import bind
from mplug.registry.entry_points import Registry
from mplug.system.files import write_whole
from mplug_tokenization.contract import CorpusTokenizer

KIND = "tokenizers"
SUFFIX = ".tokenizer"
"""The suffix after the name of the data, in the names of the record and of the copies."""
HOOK = "build_tokenizer"
FILES = "files"
"""The attribute in which a plugin's class lists the options that are files of the tokenizer."""


@dataclass(frozen=True)
class TokenizerFile:
    """A file of a tokenizer: its path, its original name, and the SHA-256 of its bytes."""

    path: str
    name: str
    sha256: str


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer that made a corpus. Its paths are absolute."""

    name: str
    options: Mapping[str, Any]
    """The fields of its Config, without files."""
    files: Mapping[str, TokenizerFile]
    """The fields of its Config that name files, by option."""
    vocab_size: int
    eod: int | None
    distribution: str
    version: str

    @property
    def fingerprint(self) -> str:
        """A digest of everything that determines its tokens: name, options, contents of its files (not their paths)."""
        parts = [self.name, self.options, {option: file.sha256 for option, file in sorted(self.files.items())}]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def as_mapping(self) -> dict[str, Any]:
        """The record as plain data for JSON."""
        return {**asdict(self), "options": dict(self.options), "fingerprint": self.fingerprint}


def describe_tokenizer(name: str, options: Mapping[str, Any], source: str = "--tokenizer") -> TokenizerRecord:
    """The record of a tokenizer that a user names. The tokenizer is built once, as a check.

    Raises UsageError for an unknown plugin or option, a missing file, or a file that the plugin cannot read.
    """
    entry = Registry.of_process().find(KIND, name)
    plugin = _load(entry)
    config = _bind(entry, plugin, options, source)
    tokenizer = plugin(config).build_tokenizer()
    fields = config.model_dump(mode="json")
    files = {
        option: _file(entry.label, option, Path(fields[option]))
        for option in getattr(plugin, FILES, ())
        if fields.get(option) is not None
    }
    fields = {option: value for option, value in fields.items() if option not in files}
    return TokenizerRecord(name, fields, files, tokenizer.vocab_size, tokenizer.eod, entry.distribution, entry.version)


def load_tokenizer(record: TokenizerRecord | Mapping[str, Any]) -> CorpusTokenizer:
    """The tokenizer of a record, after a check that its files are unchanged.

    Raises UsageError if the plugin is not installed, if a file is missing or has changed, or if the installed release
    of the plugin makes another vocabulary from the files.
    """
    record = record if isinstance(record, TokenizerRecord) else _from_mapping(record, "the given mapping", Path())
    label = f"'{record.name}' of {record.distribution} {record.version}"
    try:
        entry = Registry.of_process().find(KIND, record.name)
    except UsageError as error:
        raise UsageError(f"the data was made with tokenizer {label}: {error}") from None
    plugin = _load(entry)
    for option, file in record.files.items():
        _refuse_changed(file, _file(entry.label, option, Path(file.path)))
    options = {**record.options, **{option: file.path for option, file in record.files.items()}}
    tokenizer: CorpusTokenizer = plugin(_bind(entry, plugin, options, "recorded")).build_tokenizer()
    if (tokenizer.vocab_size, tokenizer.eod) != (record.vocab_size, record.eod):
        raise UsageError(
            f"tokenizer {label} made the data with vocab_size={record.vocab_size} and eod={record.eod}, but the "
            f"installed {entry.origin} has vocab_size={tokenizer.vocab_size} and eod={tokenizer.eod}; install "
            f"{record.distribution} {record.version}, or preprocess the data again"
        )
    return tokenizer


def _refuse_changed(file: TokenizerFile, found: TokenizerFile) -> None:
    if found.sha256 != file.sha256:
        raise UsageError(
            f"'{file.path}' has changed since the data was made with it (sha256 {file.sha256[:12]} then, "
            f"{found.sha256[:12]} now); restore the original file '{file.name}', or preprocess the data again"
        )


def record_path(prefix: Path | str) -> Path:
    """The path of the record of the data `prefix.bin`."""
    return Path(f"{prefix}{SUFFIX}.json")


@overload
def keep_tokenizer(record: TokenizerRecord, prefix: Path | str) -> TokenizerRecord: ...
@overload
def keep_tokenizer(record: None, prefix: Path | str) -> None: ...
def keep_tokenizer(record: TokenizerRecord | None, prefix: Path | str) -> TokenizerRecord | None:
    """Write the record and copies of the tokenizer's files next to `prefix.bin`; returns the record of the copies.

    Each file is written atomically, the record last. With `record` None, an existing record is removed. Raises
    UsageError if a file has changed.
    """
    target, copies = record_path(prefix), dict[str, TokenizerFile]()
    if record is None:
        target.unlink(missing_ok=True)
        return None
    for option, file in record.files.items():
        copy = target.with_name(f"{Path(prefix).name}{SUFFIX}.{option}.{file.name}")
        _refuse_changed(file, _file(f"{KIND}/{record.name}", option, Path(file.path)))
        if copy.resolve() != Path(file.path).resolve():
            write_whole(copy, Path(file.path).read_bytes())
            shutil.copystat(file.path, copy)
        copies[option] = replace(file, path=str(copy.resolve()))
    kept = replace(record, files=copies)
    saved = kept.as_mapping()
    saved["files"] = {option: {**asdict(file), "path": Path(file.path).name} for option, file in copies.items()}
    write_whole(target, json.dumps(saved, indent=2, ensure_ascii=False) + "\n")
    return kept


def read_tokenizer(prefix: Path | str) -> TokenizerRecord | None:
    """The record of the data `prefix.bin`, or None. The tokenizer is not built."""
    path = record_path(prefix)
    if not path.is_file():
        return None
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"'{path}' is not a valid tokenizer record: {error}; preprocess the data again") from None
    record = _from_mapping(saved, f"'{path}'", path.parent)
    for option, file in saved["files"].items():
        if Path(file["path"]).name != file["path"]:
            raise UsageError(
                f"'{path}' has the path '{file['path']}' for '{option}', but the file must be in the same folder; "
                f"preprocess the data again"
            )
    return record


class _SavedFile(TypedDict):
    path: Annotated[str, Field(min_length=1)]
    name: str
    sha256: str


class _SavedRecord(TypedDict):
    files: dict[str, _SavedFile]
    name: str
    options: dict[str, Any]
    vocab_size: Annotated[int, Field(strict=True, ge=1)]
    eod: Annotated[int, Field(strict=True, ge=0)] | None
    distribution: str
    version: str
    fingerprint: str


def _from_mapping(saved: Any, where: str, folder: Path) -> TokenizerRecord:
    try:
        fields = TypeAdapter(_SavedRecord).validate_python(saved)
    except (ValidationError, RecursionError) as error:
        raise UsageError(
            f"{where} is not a valid tokenizer record: {_first_problem(error)}; preprocess the data again"
        ) from None
    files = {
        option: TokenizerFile(str((folder / file["path"]).resolve()), file["name"], file["sha256"])
        for option, file in fields["files"].items()
    }
    options, size, eod = fields["options"], fields["vocab_size"], fields["eod"]
    record = TokenizerRecord(fields["name"], options, files, size, eod, fields["distribution"], fields["version"])
    if record.fingerprint != fields["fingerprint"]:
        raise UsageError(
            f"{where} was edited: its fingerprint does not match its fields; restore it, or preprocess the data again"
        )
    return record


def _first_problem(error: ValidationError | RecursionError) -> str:
    """The first reason why a mapping is not a valid record."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(map(str, first["loc"]))
    return f"it lacks '{field}'" if first["type"] == "missing" else f"{field or 'it'}: {first['msg']}"


def _load(entry: Entry) -> Any:
    plugin = Registry.of_process().load(entry)
    if not hasattr(plugin, HOOK):
        raise UsageError(f"{entry.label} ({entry.origin}) does not implement the hook '{HOOK}'")
    return plugin


def _bind(entry: Entry, plugin: Any, options: Mapping[str, Any], source: str) -> Any:
    config, problems = bind(plugin.Config, options)
    if problems:
        fields = [(".".join(problem.path), problem.message) for problem in problems]
        raise UsageError(
            "\n".join(
                f"{entry.label}{f': {field}' if field else ''} ({source}): {message}" for field, message in fields
            )
        )
    return config


def _file(label: str, option: str, path: Path) -> TokenizerFile:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(
            f"{label}: cannot read {option} '{path}': {error.strerror}; restore the file, or use another one"
        ) from None
    return TokenizerFile(str(path.resolve()), path.name, digest)
