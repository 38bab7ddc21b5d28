"""The work of `mplug serve` in each of its processes: load the weights, then serve (rank 0) or follow (the others).

The command imports this module before it has checked its options, so functions import torch themselves.
"""

import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mplug import RunError, UsageError, counted
from mplug_serve.limits import Limits

if TYPE_CHECKING:
    from mplug import Run
    from mplug.commands import Settings
    from mplug_pretrained import SavedModel
    from mplug_sampling import Sampler
    from mplug_serve.api import Served
    from mplug_serve.engine import Engine, Exchange

BACKLOG = 2048


@dataclass(frozen=True)
class Job:
    """The description of the work that each process receives: plain data that can be pickled."""

    base: "Settings"
    overrides: "Settings"
    weights: "SavedModel"
    name: str
    limits: Limits
    address: tuple[str, int]
    key: str | None
    graphs: bool
    cache_tokens: int | None
    loads_from: Path | None


def prepared(job: Job) -> "tuple[Run, Sampler]":
    """The run, which samples instead of training, and what samples; UsageError for a model that cannot be served."""
    from mplug.commands import Registry, choose_device, resolve
    from mplug_sampling import Sampler, sampling_run

    sampler = Sampler(graphs=job.graphs)
    run = sampling_run(resolve(Registry(), job.base, job.overrides), sampler)
    run.device = choose_device(run.config)
    return run, sampler


def serve(job: Job, send: Callable[..., None] | None = None) -> None:
    """Serve as rank 0, or compute what rank 0 commands."""
    from mplug.commands import allocate_parts, among, launched
    from mplug_sampling import Lanes, Ranks, replays_for

    world = launched()
    run, sampler = prepared(job)
    with among(world, run):
        listening = listen(job.address) if run.rank == 0 else None
        job.weights.load(run, allocate_parts)
        replays, _ = replays_for(run, sampler)
        lanes = Lanes(
            sampler, job.limits.lanes, job.limits.context, Ranks(run, sampler), replays, cache_tokens=job.cache_tokens
        )
        num_bytes = lanes.allocate()
        if run.rank == 0:
            click.echo(_line_of_caches(job.limits, lanes.cache_tokens, num_bytes, run.mesh.world_size))
        exchange, load = _exchange(run), partial(load_weights, run, sampler)
        if listening is None:
            from mplug_serve.engine import follow

            _leave_signals_to_the_first_rank()
            follow(lanes, exchange, load)
            return
        from mplug_serve.engine import Engine

        engine = Engine(lanes, job.limits.queue, exchange, load)
        _serve(job, replace(_served(job, run), loads_from=job.loads_from), engine, listening)


def load_weights(run: "Run", sampler: "Sampler", folder: str) -> None:
    """Load a published folder into the model that samples. Collective.

    UsageError if the folder is refused: the weights are as before. RunError if they are a mixture of both.
    """
    from mplug_pretrained.public_load import load_public_for_inference
    from mplug_saving.rank_exchanges import raise_alike

    error = None
    try:
        _refuse_folder(run, sampler, Path(folder))
    except UsageError as refused:
        error = refused
    except (OSError, RunError) as failure:
        error = UsageError(f"'{folder}' cannot be read: {failure}")
    raise_alike(run, error)
    try:
        load_public_for_inference(run, sampler.model, Path(folder))
    except UsageError as failure:
        raise RunError(f"the weights of '{folder}' are loaded in part: {failure}") from failure


def _refuse_folder(run: "Run", sampler: "Sampler", folder: Path) -> None:
    """Raise UsageError unless a folder has the weights of the model. Reads headers only."""
    from mplug_pretrained import format_of
    from mplug_pretrained.public_load import refuse_other_model

    model = sampler.model
    if model.attached and (model.adapters is None or model.adapters.path is None):
        raise UsageError(
            "the model has adapters of its run, and a folder has the weights of a base model alone; serve an export, "
            "whose weights have the adapters, and load exports"
        )
    if not folder.is_dir():
        raise UsageError(f"'{folder}' is no folder on the server's machine")
    if format_of(folder) is None:
        raise UsageError(f"no installed format reads '{folder}'; load the folder of an export")
    refuse_other_model(folder, model, run.config.checkpoint.pretrained)


def _line_of_caches(limits: Limits, cache_tokens: int | None, num_bytes: int, world_size: int) -> str:
    """The memory of the caches, for the user."""
    from mplug.commands import human_bytes

    shared = "" if cache_tokens is None else f", which share {cache_tokens:,} tokens in pages"
    ranks = " on each rank" if world_size > 1 else ""
    return f"caches of {limits.lanes} texts of {limits.context:,} tokens{shared}: {human_bytes(num_bytes)}{ranks}"


def _exchange(run: "Run") -> "Exchange":
    """How rank 0 sends commands to the other ranks."""
    if run.groups is None:
        return lambda commands: commands
    import torch.distributed as dist

    group = run.groups.beside("serves")

    def exchange(commands: Sequence[Any]) -> Sequence[Any]:
        values = [list(commands)]
        dist.broadcast_object_list(values, 0, group)
        return values[0]

    return exchange


def _served(job: Job, run: "Run") -> "Served":
    """The tokenizer of the run's data, or of the published folder, and when its texts end."""
    from mplug.commands import Registry
    from mplug_sampling.saved_model import end_tokens
    from mplug_serve.api import Served
    from mplug_tokenization import folder_tokenizer

    if job.weights.is_published:
        folder = job.weights.path
        of_folder = folder_tokenizer(Registry(), folder)
        return Served(job.name, of_folder, of_folder.encode_prompt, of_folder.encode_chat, end_tokens(folder), None)
    tokenizer = run.hooks.call.build_tokenizer(run=run)
    if tokenizer is None:
        raise UsageError(
            f"the data plugin of run '{job.name}' has no tokenizer to decode tokens; serve another run with --name"
        )
    chat, size = getattr(tokenizer, "encode_chat", None), getattr(tokenizer, "vocab_size", None)
    return Served(job.name, tokenizer, tokenizer.encode, chat, frozenset(getattr(tokenizer, "end_tokens", ())), size)


def listen(address: tuple[str, int]) -> socket.socket:
    """The socket of the server, before the weights are read; UsageError if the address cannot be had."""
    host, port = address
    try:
        found = socket.create_server((host, port), family=_family(host, port), backlog=BACKLOG)
    except OSError as error:
        raise UsageError(
            f"cannot listen on --host {host} --port {port}: {error.strerror}; choose another --port (0: a free one)"
        ) from None
    return found


def _family(host: str, port: int) -> socket.AddressFamily:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]


def _leave_signals_to_the_first_rank() -> None:
    """Rank 0 finishes its answers first, and then tells the others to stop."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _serve(job: Job, served: "Served", engine: "Engine", listening: socket.socket) -> None:
    """Answer requests until a signal, or a failure of the engine."""
    from mplug_serve.api import application
    from mplug_serve.connections import Server

    app = application(served, engine, job.limits, job.key)
    server = Server(app, job.limits.seconds, job.limits.grace, engine.stop)

    def compute() -> None:
        try:
            with engine.lanes.in_this_thread():
                engine.run()
        finally:
            server.should_exit = True

    thread = threading.Thread(target=compute, name="engine", daemon=True)
    thread.start()
    host, port = listening.getsockname()[:2]
    place = f"[{host}]" if ":" in host else host
    click.echo(f"serving '{job.name}' at http://{place}:{port} (Ctrl-C stops it)")
    server.run(sockets=[listening])
    engine.stop()
    thread.join()
    if engine.failure is not None:
        raise RunError(f"the server stopped, because the model failed: {engine.failure}") from engine.failure
    click.echo(f"stopped after {counted(engine.num_answers, 'answer')} with {counted(engine.num_tokens, 'token')}")
