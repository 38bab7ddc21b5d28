"""Opens streams of a prepared data set or a blend, and collates their samples into micro batches."""

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.energon import SavableDataLoader, TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset
from megatron.energon.errors import log_exception

from mplug import CorpusTokenizer, MicroBatch, UsageError
from mplug_energon.sources import message_of, name_tars, stop
from mplug_energon.streams import Collate, Shape, StreamLoader

if TYPE_CHECKING:
    from mplug_energon.config import EnergonConfig

REQUIRED = ("tokens", "labels")


def make_loader(
    config: "EnergonConfig",
    tokenizer: CorpusTokenizer,
    *,
    part: str,
    seq_length: int,
    seed: int,
    shard: tuple[int, int],
    micro_batch_size: int,
) -> StreamLoader:
    """A loader of this rank's streams of a part of the data set; `shard` is (index, number of data-parallel ranks)."""
    encoder = make_encoder(config.task_encoder, config.task_encoder_options, seq_length, tokenizer)
    vocab_size: int = getattr(encoder, "vocab_size", None) or tokenizer.vocab_size
    return StreamLoader(
        lambda stream: open_stream(config, encoder, part, seed, stream),
        config.path,
        Shape(config.streams, config.num_workers),
        collate(config.entries, seq_length, config.task_encoder),
        vocab_size=vocab_size,
        shard=shard,
        micro_batch_size=micro_batch_size,
    )


def make_encoder(named: str, options: Mapping[str, Any], seq_length: int, tokenizer: CorpusTokenizer) -> TaskEncoder:
    """The task encoder of `module:Class`; raises UsageError if it does not exist or does not accept the options."""
    module, _, name = named.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"data.task_encoder '{named}' cannot be imported: {error}; set it to module:Class") from error
    if not (isinstance(found, type) and issubclass(found, TaskEncoder)):
        raise UsageError(
            f"data.task_encoder '{named}' is not a subclass of megatron.energon.TaskEncoder; set it to one"
        )
    supplied, parameters = {"seq_length": seq_length, "tokenizer": tokenizer}, inspect.signature(found).parameters
    arguments = {**{name: value for name, value in supplied.items() if name in parameters}, **options}
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
        global_error_handler=stop if config.on_error == "stop" else log_exception,
        restore_error_handler=stop,
    )
    try:
        dataset = get_train_dataset(
            config.path,
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
    name_tars(dataset, config.path)
    loader = get_savable_loader(
        dataset,
        gc_collect_every_n_steps=0 if config.num_workers == 0 else 100,  # it would freeze the trainer's objects
        watchdog_timeout_seconds=None,  # it would end processes; the host detects late data itself
    )
    loader.pin_memory = False  # the host pins
    return loader


def collate(entries: tuple[str, ...], length: int, named: str) -> Collate:
    """A function that collates encoded samples into a micro batch, with the additional `entries`."""

    def make(samples: list[Any], numbers: list[int]) -> MicroBatch:
        rows = [_fields(sample) for sample in samples]
        names = [*REQUIRED, *(name for name in ("positions",) if name in rows[0]), *entries]
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
        return {"positions": torch.arange(length)[None], **batch, "sample_ids": torch.tensor(numbers)}

    return make


def _fields(sample: Any) -> dict[str, Any]:
    if is_dataclass(sample):
        found = {field.name: getattr(sample, field.name) for field in fields(sample)}
    else:
        found = dict(sample) if isinstance(sample, Mapping) else {}
    return {name: value for name, value in found.items() if not name.startswith("__")}
