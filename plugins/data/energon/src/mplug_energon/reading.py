"""Opens streams of a prepared data set or a blend, and collates their samples into micro batches."""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.energon import SavableDataLoader, TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset

from mplug import DOCUMENTS, STREAMS, MicroBatch, UsageError
from mplug_energon.faults import Skip, stop
from mplug_energon.sources import message_of, name_tars
from mplug_energon.streams import Collate, Shape, StreamLoader
from mplug_tokenization import CorpusTokenizer

if TYPE_CHECKING:
    from mplug_energon.config import EnergonConfig
    from mplug_streams import Processor

REQUIRED = ("tokens", "labels")
BUNDLED = {"text": "mplug_energon.encoders:Text", "image-text": "mplug_energon.encoders:ImageText"}
"""Value of `data.task_encoder` -> the class, of the bundled encoders that are constructed as other classes are."""


@dataclass(frozen=True)
class Supplied:
    """What a task encoder receives if its `__init__` has arguments with these names."""

    seq_length: int
    tokenizer: CorpusTokenizer
    processor: "Processor | None" = None
    """That of the model, if micro batches have the entries of its streams."""


def make_loader(
    config: "EnergonConfig",
    encoder: TaskEncoder,
    supplied: "Supplied",
    *,
    part: str,
    seed: int,
    shard: tuple[int, int],
    micro_batch_size: int,
) -> StreamLoader:
    """A loader of this rank's streams of a part of the data set; `shard` is (index, number of data-parallel ranks)."""
    vocab_size: int = getattr(encoder, "vocab_size", None) or supplied.tokenizer.vocab_size
    return StreamLoader(
        lambda stream: open_stream(config, encoder, part, seed, stream),
        str(config.folder),
        Shape(config.streams, config.num_workers),
        collate(config.all_entries, supplied, config.task_encoder),
        vocab_size=vocab_size,
        shard=shard,
        micro_batch_size=micro_batch_size,
    )


def make_encoder(named: str, options: Mapping[str, Any], supplied: Supplied) -> TaskEncoder:
    """The task encoder of a name or `module:Class`; UsageError if it does not exist or does not accept the options."""
    module, _, name = BUNDLED.get(named, named).partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"data.task_encoder '{named}' cannot be imported: {error}; set it to module:Class") from error
    if not (isinstance(found, type) and issubclass(found, TaskEncoder)):
        raise UsageError(
            f"data.task_encoder '{named}' is not a subclass of megatron.energon.TaskEncoder; set it to one"
        )
    parameters = inspect.signature(found).parameters
    given = {field.name: getattr(supplied, field.name) for field in fields(supplied) if field.name in parameters}
    arguments = {**given, **options}
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        raise UsageError(
            f"data.task_encoder_options does not match the arguments of '{named}': {error}; correct it"
        ) from None
    encoder: TaskEncoder = found(**arguments)
    return encoder


def open_stream(config: "EnergonConfig", encoder: TaskEncoder, part: str, seed: int, stream: int) -> SavableDataLoader:
    """A stream at its beginning: endless, shuffled, sample by sample, so that micro batches may have any size."""
    worker = WorkerConfig(
        rank=stream,
        world_size=config.streams,
        num_workers=config.num_workers,
        seed_offset=seed,
        global_error_handler=stop if config.on_error == "stop" else Skip(),
        restore_error_handler=stop,
    )
    try:
        dataset = get_train_dataset(
            str(config.folder),
            split_part=part,
            worker_config=worker,
            batch_size=None,
            packing_buffer_size=config.packing_buffer_size,
            shuffle_buffer_size=config.shuffle_buffer_size,
            max_samples_per_sequence=config.max_samples_per_sequence,
            task_encoder=encoder,
        )
    except Exception as error:  # Energon raises any exception for a wrong data set
        raise UsageError(
            f"data.path '{config.path}': Energon cannot read part '{part}': {message_of(error)}; use an existing part, "
            f"or run 'energon prepare' again (a part consists of whole tar files, so each part needs at least one)"
        ) from error
    name_tars(dataset, str(config.folder))
    loader = get_savable_loader(
        dataset,
        gc_collect_every_n_steps=0 if config.num_workers == 0 else 100,  # it would freeze the trainer's objects
        watchdog_timeout_seconds=None,  # it would end processes; the host detects late data itself
    )
    loader.pin_memory = False  # the host pins
    return loader


def collate(entries: tuple[str, ...], supplied: Supplied, named: str) -> Collate:
    """A function that collates encoded samples into a micro batch, with the additional `entries`.

    For the entries of streams, samples have `media`: a sequence of media, in the order of their tokens.
    """
    length, stacked = supplied.seq_length, tuple(name for name in entries if name != STREAMS)

    def make(samples: list[Any], numbers: list[int]) -> MicroBatch:
        rows = [_fields(sample) for sample in samples]
        names = [*REQUIRED, *(name for name in ("positions",) if name in rows[0]), *stacked]
        for name in names:
            wrong = next((row for row in rows if not isinstance(row.get(name), torch.Tensor)), None)
            if wrong is not None:
                raise UsageError(
                    f"data.task_encoder '{named}' returns no tensor '{name}' (it returns {', '.join(wrong)}); correct "
                    f"the encoder or data.entries"
                )
        for name in REQUIRED:
            for row in rows:
                if row[name].shape != (length,):
                    raise UsageError(
                        f"data.task_encoder '{named}' returns '{name}' of shape {tuple(row[name].shape)}; return "
                        f"shape ({length},), which is trainer.seq_length"
                    )
        batch = {name: torch.stack([row[name] for row in rows]) for name in names}
        if STREAMS in entries and supplied.processor is not None:
            batch |= _of_streams(batch, rows, supplied.processor, named)
        return {"positions": torch.arange(length)[None], **batch, "sample_ids": torch.tensor(numbers)}

    return make


def _of_streams(
    batch: MicroBatch, rows: Sequence[Mapping[str, Any]], processor: "Processor", named: str
) -> Mapping[str, torch.Tensor]:
    """The entries of the model's streams. UsageError if the encoder's tokens are not those of its media."""
    wrong = next((row for row in rows if "media" not in row), None)
    if wrong is not None:
        raise UsageError(
            f"data.task_encoder '{named}' returns no 'media' (it returns {', '.join(wrong)}), from which "
            f"'{STREAMS}' of data.entries are made; return a sequence of media"
        )
    try:
        return processor.entries_of(batch["tokens"], [row["media"] for row in rows], batch.get(DOCUMENTS))
    except ValueError as error:
        raise UsageError(f"data.task_encoder '{named}' returns tokens that do not fit its media: {error}") from error


def _fields(sample: Any) -> dict[str, Any]:
    if is_dataclass(sample):
        found = {field.name: getattr(sample, field.name) for field in fields(sample)}
    else:
        found = dict(sample) if isinstance(sample, Mapping) else {}
    return {name: value for name, value in found.items() if not name.startswith("__")}
