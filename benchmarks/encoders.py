"""The speed of BERT-large with masked tokens in mplug, packed, and in loops of the transformers library; that of T5.

    python benchmarks/encoders.py [--preset large] [--attention flash] [--kernels triton] [--rows 32] [--steps 10] ...
    python benchmarks/encoders.py --model t5 --preset v1.1-xl --rows 64 --micro 16 --attention flex --set ...
    python benchmarks/encoders.py --preset tiny --rows 2 --steps 1 --length 64   (on a CPU, for a test)

Encoders: all train on one device on the same documents of random tokens, of which 15% are masked, without dropout.
mplug packs them into rows of `--length` tokens; attention stays within a document. The library has one document in a
row:

- `padded`: as its collators make batches, padded to the longest document of the batch, eager;
- `compiled`: padded to `--length`, so that shapes stay the same; blocks and head are compiled, each of them once;
- `sorted`: the documents of a step sorted by length and divided into `--groups` micro batches, each padded to its own
  longest, compiled for all lengths: the library's `group_by_length`, with the whole step as its window;
- `full` (only if named): whole rows without padding, as if every document had `--length` tokens, compiled.

Its batches have as many rows as there are documents in mplug's. Batches are in pinned memory before the first step, and
no loop waits for a loss. Its weights, gradients and moments are bf16, where mplug has fp32 masters and moments; its
optimizer is the fused AdamW. All clip gradients.

T5: only mplug, with spans of random tokens. `--length` is that of the decoder.

Each part prints a line when it begins, the seconds of its first steps, and its figures as a line of JSON: tokens per
second without padding, TFLOP/s, MFU, memory. FLOPs are those of products with the tokens and of attention within
documents, times 3 for backward, for every part the same: padding, and what is computed twice, does not count.
"""

import argparse
import faulthandler
import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import compilation_time_metrics
from torch.nn.functional import cross_entropy

from mplug.config.defaults import default_settings
from mplug.config.sources import from_mapping, merge, read_assignments
from mplug.contracts.micro_batch import DOCUMENTS, IGNORED, MicroBatch
from mplug.model.build import choose_device
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.assembly import Parts, build
from mplug.training.hardware import peak_memory_gib, peak_tflops
from mplug_compile.compilation import compiled_graphs
from mplug_estimates import timed

MASK = 103
"""The number of [MASK] in the vocabulary of BERT; a byte in that of the preset tiny."""
Batches = list[MicroBatch]
"""The micro batches of a step."""
BEGUN = time.perf_counter()


def say(*words: object) -> None:
    """Print at once, behind the seconds since the start."""
    print(f"[{time.perf_counter() - BEGUN:6.1f} s]", *words, flush=True)


@dataclass(frozen=True)
class Work:
    """What a step computes: tokens, rows of streams by their entry of lengths, and FLOPs."""

    tokens: int
    flops: int
    rows: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """The figures of a participant: seconds of each step, and the work of each."""

    name: str
    seconds: list[float]
    work: list[Work]
    memory_gib: float
    loss: float
    peak: float | None

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second."""
        return sum(one.tokens for one in self.work) / sum(self.seconds)

    @property
    def tflops(self) -> float:
        """TFLOP/s."""
        return sum(one.flops for one in self.work) / sum(self.seconds) / 1e12

    @property
    def figures(self) -> dict[str, Any]:
        """All figures, for JSON."""
        streams = self.work[0].rows
        rows = {f"{name}_per_s": sum(one.rows[name] for one in self.work) / sum(self.seconds) for name in streams}
        return {
            "part": self.name,
            "tokens_per_s": round(self.tokens_per_s),
            **{name: round(rate) for name, rate in rows.items()},
            "tflops": round(self.tflops, 2),
            "mfu": round(self.tflops / self.peak, 4) if self.peak else None,
            "memory_gib": round(self.memory_gib, 2),
            "loss": round(self.loss, 4),
            "step_ms": [round(1e3 * one, 1) for one in self.seconds],
        }


def run_of(chosen: argparse.Namespace) -> Run:
    """The run of mplug."""
    model: dict[str, object] = {"name": chosen.model, "preset": chosen.preset}
    data: dict[str, object] = {
        "name": "masked",
        "mask_token": MASK,
        "of": {"name": "mock", "documents": chosen.documents},
    }
    if chosen.model == "bert":
        model |= {"dropout": 0.0, "attention_dropout": 0.0}
    if chosen.model == "t5":
        text = {"name": "mock", "vocab_size": chosen.vocabulary}
        data = {"name": "spans", "encoder_length": chosen.encoder_length, "end_token": 1, "of": text}
        model["encoder_length"] = chosen.encoder_length
    kernels = {"attention": chosen.attention, "default": chosen.kernels}
    settings = {
        "model": model,
        "data": data,
        "kernels": {name: kernel for name, kernel in kernels.items() if kernel not in ("", "auto")},
        "trainer": {
            "seq_length": chosen.length,
            "global_batch_size": chosen.rows,
            "micro_batch_size": chosen.micro or chosen.rows,
            "steps": 1000,
            "precision": "bf16" if torch.cuda.is_available() else "fp32",
        },
    }
    changes = [from_mapping(settings, "benchmark"), read_assignments(chosen.set)]
    run = prepare(resolve(Registry(), default_settings(), merge(*changes)))
    run.device = choose_device(run.config)
    return run


def pinned(run: Run, batch: MicroBatch) -> MicroBatch:
    """A micro batch in memory that the device reads while the CPU goes on."""
    return {name: x.pin_memory() if run.device == "cuda" else x for name, x in batch.items()}


def measured(
    name: str, step: Callable[[Batches], Tensor], batches: Sequence[Batches], work: Sequence[Work], run: Run, steps: int
) -> Measured:
    """Time steps; each of the batches has been trained on before."""
    begun = time.perf_counter()
    for number, batch in enumerate(batches):
        step(batch)
        if run.device == "cuda":
            torch.cuda.synchronize()
        say(f"{name}: first step of batch {number} done, {time.perf_counter() - begun:.1f} s after the start")
    losses, turns = list[Tensor](), cycle(batches)
    seconds = timed(lambda: losses.append(step(next(turns))), steps, run.device)
    done = [one for _, one in zip(range(steps), cycle(work), strict=False)]
    found = Measured(name, seconds, done, peak_memory_gib(run.device), float(losses[-1]), peak_tflops(run.device))
    say(json.dumps(found.figures))
    return found


def ours(run: Run, chosen: argparse.Namespace) -> tuple[Measured, list[Batches], list[Work]]:
    """mplug's figures, the micro batches of each step, and the work of each."""
    say("mplug: building")
    parts = build(run)
    say(f"mplug: {sum(placement.numel for placement in parts.model.placements.values()):,} parameters are in memory")
    batches = [
        [pinned(run, batch) for batch in parts.train_loader.loader.take(chosen.rows)] for _ in range(chosen.batches)
    ]
    work = [work_of(parts, step) for step in batches]
    say(f"mplug: batches are ready, with {documents_of(batches):,} documents in all")

    def step(batches: Batches) -> Tensor:
        run.step += 1
        parts.stepper.forward_backward(parts.train_loader.step_of(batches), run.step)
        if run.step <= chosen.batches:
            say(f"mplug: forward and backward of step {run.step} are launched; {compiler_seconds()}")
        return parts.stepper.update(1e-5, 0.0).loss

    name = f"mplug, {'packed, ' * (chosen.model != 't5')}{chosen.attention}"
    return measured(name, step, batches, work, run, chosen.steps), batches, work


def compiler_seconds() -> str:
    """The seconds of torch's compiler so far: of tracing with all that it calls, and of inductor."""
    seconds = {name: sum(each) for name, each in compilation_time_metrics.items()}
    inductor = sum(one for name, one in seconds.items() if name.endswith("compile_fx_inner"))
    return f"{compiled_graphs()} graphs, {seconds.get('_compile.compile_inner', 0.0):.1f} s, inductor {inductor:.1f} s"


def work_of(parts: Parts, batches: Batches) -> Work:
    """The work of a step of these micro batches."""
    tokens, flops, rows = 0, 0, dict[str, int]()
    for batch in batches:
        own = batch["tokens"].numel()
        lengths = batch.get(DOCUMENTS, torch.full((len(batch["tokens"]),), batch["tokens"].shape[1]))
        flops += parts.model.flops.of(own, int(lengths.square().sum()))
        tokens += own
        for name, passes in parts.model.stream_passes.items():
            flops += passes.flops.of(int(batch[name].sum()), int(batch[name].square().sum()))
            rows[name] = rows.get(name, 0) + int(batch[name].sum())
    return Work(tokens, flops, rows)


def documents_of(batches: Sequence[Batches]) -> int:
    """The number of documents of steps."""
    every = [batch for step in batches for batch in step]
    return sum(int((batch[DOCUMENTS] > 0).sum()) if DOCUMENTS in batch else len(batch["tokens"]) for batch in every)


# The library.

Document = tuple[Tensor, Tensor]
"""The tokens and the labels of a document."""


def read(batches: Batches) -> list[Document]:
    """The documents of a step."""
    return [
        (tokens[end - size : end], labels[end - size : end])
        for batch in batches
        for tokens, labels, sizes in zip(batch["tokens"], batch["labels"], batch[DOCUMENTS].tolist(), strict=True)
        for end, size in zip(torch.tensor(sizes).cumsum(0).tolist(), sizes, strict=True)
        if size
    ]


def padded(documents: Sequence[Document], length: int | None = None) -> MicroBatch:
    """A micro batch as the library takes it: a document in a row; `length` None pads to the longest."""
    longest = length or max(len(tokens) for tokens, _ in documents)
    shape = (len(documents), longest)
    found = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    found["labels"] = torch.full(shape, IGNORED)
    for row, (tokens, labels) in enumerate(documents):
        found["input_ids"][row, : len(tokens)], found["labels"][row, : len(tokens)] = tokens, labels
        found["attention_mask"][row, : len(tokens)] = 1
    return found


def sorted_by_length(documents: Sequence[Document], groups: int) -> Batches:
    """Micro batches of documents of similar lengths, each padded to the longest of its own."""
    in_order = sorted(documents, key=lambda one: len(one[0]), reverse=True)
    borders = [len(in_order) * part // groups for part in range(groups + 1)]
    return [padded(in_order[start:end]) for start, end in pairwise(borders)]


def whole(batches: Batches) -> Batches:
    """Whole rows without padding."""
    return [{"input_ids": batch["tokens"], "labels": batch["labels"]} for batch in batches]


class LibraryLoss(nn.Module):
    """The sum of the losses of the library's head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.transform = (model.cls,) if hasattr(model, "cls") else (model.head, model.decoder)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """x [B, S, D], labels [B, S] -> the sum in nats."""
        for part in self.transform:
            x = part(x)
        return cross_entropy(x.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def theirs(
    run: Run,
    chosen: argparse.Namespace,
    name: str,
    batches: Sequence[Batches],
    work: Sequence[Work],
    dynamic: bool | None,
) -> Measured:
    """The library's figures. With `dynamic`, blocks and head are compiled, for any sizes or for those that come."""
    from mplug_huggingface_format.model_config import config_of
    from transformers import AutoConfig, AutoModelForMaskedLM

    config = AutoConfig.for_model(**config_of(run.config))
    for field_name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        if hasattr(config, field_name):
            setattr(config, field_name, 0.0)
    dtype = torch.bfloat16 if run.config.trainer.precision == "bf16" else torch.float32
    with torch.device(run.device):
        model = AutoModelForMaskedLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    model.train()
    body, head = model.base_model, LibraryLoss(model)
    if dynamic is not None:
        for part in (*(body.encoder.layer if hasattr(body, "encoder") else body.layers), head):
            part.compile(dynamic=dynamic)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=run.device == "cuda")

    def step(batches: Batches) -> Tensor:
        moved = [{name: x.to(run.device, non_blocking=True) for name, x in batch.items()} for batch in batches]
        targets = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
        losses = []
        for batch in moved:
            labels = batch.pop("labels")
            losses.append(head(body(**batch).last_hidden_state, labels) / targets)
            losses[-1].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum().detach()

    batches = [[pinned(run, batch) for batch in step] for step in batches]
    return measured(f"transformers, sdpa, {name}", step, batches, work, run, chosen.steps)


def freed(run: Run) -> None:
    """Give the memory of the participant before back."""
    gc.collect()
    torch.compiler.reset()
    if run.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> None:
    """Measure all parts, and print their ratios."""
    chosen = options()
    if chosen.where:
        faulthandler.dump_traceback_later(chosen.where, repeat=True)
    run = run_of(chosen)
    found, batches, work = ours(run, chosen)
    table = [found]
    documents = [read(step) for step in batches] if chosen.model != "t5" else []
    makers: dict[str, tuple[str, Callable[[int], Batches], bool | None]] = {
        "padded": ("padded to the longest", lambda n: [padded(documents[n])], None),
        "compiled": (f"compiled, padded to {chosen.length}", lambda n: [padded(documents[n], chosen.length)], False),
        "sorted": ("compiled, sorted by length", lambda n: sorted_by_length(documents[n], chosen.groups), True),
        "full": ("compiled, without padding", lambda n: whole(batches[n]), False),
    }
    for part in [] if chosen.model == "t5" else chosen.library:
        name, rows, dynamic = makers[part]
        freed(run)
        say(f"transformers, {name}: building")
        table.append(theirs(run, chosen, name, [rows(n) for n in range(len(batches))], work, dynamic))
    for one in table[1:]:
        say(f"ratio of tokens/s to '{one.name}': {found.tokens_per_s / one.tokens_per_s:.2f}")
    if chosen.out:
        Path(chosen.out).write_text(json.dumps([asdict(one) | one.figures for one in table]))


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="bert", choices=["bert", "modernbert", "t5"])
    parser.add_argument("--preset", default="large")
    parser.add_argument("--attention", default="auto", help="kernel of mplug's attention; auto: the default run's")
    parser.add_argument("--kernels", default="", help="mplug's default kernels, such as triton")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=32, help="rows of a step")
    parser.add_argument("--micro", type=int, default=0, help="rows of mplug's micro batches; 0: all of them")
    parser.add_argument("--documents", type=int, default=4, help="documents of a row")
    parser.add_argument("--encoder-length", type=int, default=512, help="T5: tokens of a text of the encoder")
    parser.add_argument("--vocabulary", type=int, default=32000, help="T5: tokens besides the sentinels")
    parser.add_argument("--batches", type=int, default=4, help="number of different batches")
    parser.add_argument("--groups", type=int, default=4, help="micro batches of a step of the library's part 'sorted'")
    parser.add_argument("--steps", type=int, default=10, help="measured steps")
    parser.add_argument(
        "--library",
        nargs="*",
        default=["padded", "compiled", "sorted"],
        choices=["padded", "compiled", "sorted", "full"],
        help="the library's loops; none with --model t5",
    )
    parser.add_argument(
        "--where", type=float, default=0, help="print the stack of every thread after so many seconds, again and again"
    )
    parser.add_argument("--set", action="append", default=[], help="a setting of mplug's run, as in mplug train")
    parser.add_argument("--out", help="file for the figures, in JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
