"""mplug serve."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mplug.commands import Finite
from mplug_sampling.saved_model import ModelOptions, graphs_option, model_options, refuse_scores

if TYPE_CHECKING:
    from mplug.commands import World
    from mplug_serve.work import Job

LOOPBACK = ("127.0.0.1", "::1", "localhost")
LONGEST = 4096
"""The default length of texts with --pretrained, unless the model supports less."""
KEY_VARIABLE = "MPLUG_SERVE_KEY"


@click.command()
@model_options("Serve", adapt=False)
@click.option("--host", default=LOOPBACK[0], show_default=True, help="Address to listen on; others need a key.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="Port; 0: a free one.")
@click.option(
    "--key",
    envvar=KEY_VARIABLE,
    help=f"Clients must send this key ('Authorization: Bearer KEY'); default: the variable {KEY_VARIABLE}.",
)
@click.option("--lanes", default=16, show_default=True, type=click.IntRange(1, 4096), help="Texts computed together.")
@click.option(
    "--cache-tokens",
    type=click.IntRange(1, 2**40),
    metavar="N",
    help="Let texts share pages of a cache with room for N tokens; default: room for --context tokens in each lane.",
)
@click.option(
    "--load-from",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Let requests (POST /update_weights_from_disk) load new weights from folders in this one.",
)
@click.option(
    "--queue",
    default=64,
    show_default=True,
    type=click.IntRange(0, 10**6),
    help="Requests that wait for a lane; the server refuses further ones (status 503).",
)
@click.option(
    "--context",
    type=click.IntRange(2, 2**31),
    metavar="N",
    help="Tokens of a prompt and its answer; default: trainer.seq_length of the run. With --pretrained: what the model "
    f"supports, at most {LONGEST}.",
)
@click.option(
    "--max-tokens",
    default=1024,
    show_default=True,
    type=click.IntRange(1, 2**31),
    help="Most tokens of an answer; also those of a chat's answer if a request names no number.",
)
@click.option(
    "--max-body",
    default=2**20,
    show_default=True,
    type=click.IntRange(1, 2**31),
    help="Bytes of a request; longer ones are refused (status 413).",
)
@click.option(
    "--timeout",
    default=300.0,
    show_default=True,
    type=Finite(0, min_open=True),
    help="Seconds of a request, with its wait for a lane. Its answer then ends, or has status 503 if it has not begun.",
)
@click.option(
    "--grace",
    default=30.0,
    show_default=True,
    type=Finite(0),
    help="Seconds that answers may take to end when the server is stopped (SIGTERM, Ctrl-C).",
)
@graphs_option
def command(**options: Any) -> None:
    """Serve a trained run, or a published checkpoint, with the interface of OpenAI.

    The server answers POST /v1/completions and /v1/chat/completions, streamed or whole, GET /v1/models and GET /health.
    GET / is a page to try the model in a browser. Chats need a chat template: that of the published folder, or of a
    run that was trained on conversations.

    Texts begin and end at any step (continuous batching). With --cache-tokens, they share the pages of one cache; the
    newest text waits when no page is free. A text is that of `mplug generate` with the same prompt,
    sampling and seed, except for rounding. Greedy decoding is temperature 0.

    The server listens on the loopback address only, unless --host names another; then it needs a key. SIGTERM and
    Ctrl-C end it: it refuses new requests, and finishes the answers that have begun.

    \b
    mplug serve --name chat
    mplug serve --pretrained Qwen3-8B --precision bf16 --host 0.0.0.0 --key "$KEY"
    mplug serve --pretrained Qwen3-8B --precision bf16 --parallel tp2
    curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "def ", "max_tokens": 50, "temperature": 0}'
    """
    from mplug.commands import launched
    from mplug_pretrained import run_forward
    from mplug_serve.work import prepared, serve

    asked, world = Asked(**options), launched()
    asked.refuse_contradictions()
    job = asked.job(world)
    run, _ = prepared(job)  # refuses before any process starts
    run_forward(run, world, serve, job)


@dataclass(frozen=True, kw_only=True)
class Asked(ModelOptions):
    """The options of the command line."""

    host: str
    port: int
    key: str | None
    lanes: int
    cache_tokens: int | None
    load_from: Path | None
    queue: int
    context: int | None
    max_tokens: int
    max_body: int
    timeout: float
    grace: float
    graphs: str

    def refuse_contradictions(self) -> None:
        """Raise UsageError for options that contradict each other."""
        from mplug import UsageError

        super().refuse_contradictions()
        if self.host not in LOOPBACK and not self.key:
            raise UsageError(
                f"--host {self.host} lets other machines use the model, and there is no key; add --key, or set "
                f"{KEY_VARIABLE}"
            )
        if self.key is not None and not (self.key.isascii() and self.key.isprintable() and self.key.strip()):
            raise UsageError("--key must be printable ASCII characters, because clients send it in a header")
        if self.load_from is not None and not self.load_from.is_dir():
            raise UsageError(f"--load-from: directory '{self.load_from}' does not exist; make it first")

    def job(self, world: "World | None") -> "Job":
        """What each process does."""
        from mplug import UsageError
        from mplug_serve.limits import Limits
        from mplug_serve.work import Job

        own = ["trainer.compile=never", "trainer.eval_every=0"]
        if self.context is not None and self.pretrained is not None:
            own.append(f"trainer.seq_length={self.context}")
        found = self.chosen(self.settings("serve", *own), world, 1, LONGEST)
        refuse_scores(found.run, found.directory)
        context = found.run.config.trainer.seq_length
        if self.context is not None and self.context > context:
            raise UsageError(
                f"--context {self.context} is longer than the {context} tokens of trainer.seq_length, with which the "
                f"run was trained; use at most {context}"
            )
        context = self.context or context
        if self.cache_tokens is not None and self.cache_tokens < context:
            raise UsageError(
                f"--cache-tokens {self.cache_tokens} has no room for one text of {context} tokens; use at least "
                f"{context}, or a smaller --context"
            )
        limits = Limits(
            context=context,
            lanes=self.lanes,
            queue=self.queue,
            max_tokens=self.max_tokens,
            max_body=self.max_body,
            seconds=self.timeout,
            grace=self.grace,
        )
        name = found.weights.path.name if found.directory is None else found.directory.name
        address = (self.host, self.port)
        described = found.base, found.overrides, found.weights, name, limits, address, self.key
        return Job(*described, graphs=self.graphs == "auto", cache_tokens=self.cache_tokens, loads_from=self.load_from)
