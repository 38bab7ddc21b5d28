"""The speed of BERT-large with masked tokens in mplug, packed, and in a loop of the transformers library.

    python benchmarks/encoders.py [--preset large] [--attention sdpa] [--kernels triton] [--rows 32] [--steps 10] ...
    python benchmarks/encoders.py --preset tiny --rows 2 --steps 1 --length 64   (on a CPU, for a test)

Both train on one device on the same documents of random tokens, of which 15% are masked, without dropout. mplug packs
them into rows of `--length` tokens; attention stays within a document. The library's loop has one document in a row, as
its collators make them: padded to the longest of the batch (eager), or to `--length` (compiled, so that shapes stay the
same). It has as many rows in a batch as there are documents in mplug's. Its weights, gradients and moments are bf16,
where mplug has fp32 masters and moments; its optimizer is the fused AdamW. Both clip gradients. The faster of the
library's two counts for the ratio.

Printed for each: tokens per second without padding, MFU (matrix products of the tokens without padding, attention
within documents; times 3 for backward), and memory. With `--full`, the library also trains on whole rows without
padding, as if every document had `--length` tokens: its upper bound.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mplug.config.defaults import default_settings
from mplug.config.sources import from_mapping, merge, read_assignments
from mplug.contracts.micro_batch import DOCUMENTS, IGNORED, MicroBatch
from mplug.model.build import choose_device
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.assembly import build
from mplug.training.hardware import peak_memory_gib, peak_tflops, timed

MASK = 103
"""The number of [MASK] in the vocabulary of BERT; a byte in that of the preset tiny."""


@dataclass
class Measured:
    """The figures of a participant: seconds of each step, tokens without padding and FLOPs of all steps."""

    name: str
    seconds: list[float]
    tokens: int
    flops: int
    memory_gib: float
    loss: float
    peak: float | None

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / sum(self.seconds)

    @property
    def row(self) -> str:
        """A line of the table."""
        tflops = self.flops / sum(self.seconds) / 1e12
        mfu = f"{100 * tflops / self.peak:9.1f}%" if self.peak else f"{'':10}"
        return f"{self.name:44}{self.rate:12,.0f}{tflops:10.1f}{mfu}{self.memory_gib:9.1f}"


def run_of(chosen: argparse.Namespace) -> Run:
    """The run of mplug."""
    settings: dict[str, object] = {
        "model": {"name": chosen.model, "preset": chosen.preset},
        "data": {
            "name": "masked",
            "mask_token": MASK,
            "of": {"name": "mock", "documents": chosen.documents},
        },
        "trainer": {
            "seq_length": chosen.length,
            "global_batch_size": chosen.rows,
            "micro_batch_size": chosen.rows,
            "steps": 1000,
            "precision": "bf16" if torch.cuda.is_available() else "fp32",
        },
    }
    if chosen.model == "bert":
        quiet = {"dropout": 0.0, "attention_dropout": 0.0}
        settings["model"] = {**quiet, "name": chosen.model, "preset": chosen.preset}
    if chosen.attention != "auto":
        settings["kernels"] = {"attention": chosen.attention}
    if chosen.kernels:
        settings["kernels"] = {**dict(settings.get("kernels", {})), "default": chosen.kernels}  # type: ignore[call-overload]
    changes = [from_mapping(settings, "benchmark"), read_assignments(chosen.set)]
    run = prepare(resolve(Registry(), default_settings(), merge(*changes)))
    run.device = choose_device(run.config)
    return run


def pinned(run: Run, batch: MicroBatch) -> dict[str, Tensor]:
    """A micro batch in memory that the device reads while the CPU goes on."""
    return {name: x.pin_memory() if run.device == "cuda" else x for name, x in batch.items()}


def measured(
    name: str,
    step: Callable[[Any], Tensor],
    batches: Sequence[Any],
    work: Sequence[tuple[int, int]],
    run: Run,
    steps: int,
) -> Measured:
    """Time steps; every batch has been trained on before. `work` are (tokens, FLOPs) of each batch."""
    for batch in batches:
        step(batch)
    losses, turns = list[Tensor](), cycle(batches)
    seconds = timed(lambda: losses.append(step(next(turns))), steps, run.device)
    done = [pair for _, pair in zip(range(steps), cycle(work), strict=False)]
    tokens, flops = (sum(numbers) for numbers in zip(*done, strict=True))
    return Measured(
        name, seconds, tokens, flops, peak_memory_gib(run.device), float(losses[-1]), peak_tflops(run.device)
    )


def ours(run: Run, chosen: argparse.Namespace) -> tuple[Measured, list[MicroBatch], list[tuple[int, int]]]:
    """mplug's figures, the micro batches, and the work of each."""
    parts = build(run)
    batches = [pinned(run, batch) for batch in parts.train_loader.loader.take(chosen.batches * chosen.rows)]
    work = [
        (batch["tokens"].numel(), parts.model.flops.of(batch["tokens"].numel(), int(batch[DOCUMENTS].square().sum())))
        for batch in batches
    ]

    def step(batch: MicroBatch) -> Tensor:
        run.step += 1
        parts.stepper.forward_backward(parts.train_loader.step_of([batch]), run.step)
        return parts.stepper.update(1e-5, 0.0).loss

    start = time.perf_counter()
    found = measured(f"mplug, packed, {chosen.attention}", step, batches, work, run, chosen.steps)
    print(f"mplug: {time.perf_counter() - start:.0f} s with compilation; {documents_of(batches):,} documents in all")
    return found, batches, work


def documents_of(batches: Sequence[MicroBatch]) -> int:
    """The number of documents of micro batches."""
    return sum(int((batch[DOCUMENTS] > 0).sum()) for batch in batches)


def rows_of(batch: MicroBatch, length: int | None) -> dict[str, Tensor]:
    """A micro batch as the library takes it: a document in a row; `length` None pads to the longest."""
    documents = [
        (tokens[end - size : end], labels[end - size : end])
        for tokens, labels, sizes in zip(batch["tokens"], batch["labels"], batch[DOCUMENTS].tolist(), strict=True)
        for end, size in zip(torch.tensor(sizes).cumsum(0).tolist(), sizes, strict=True)
        if size
    ]
    longest = length or max(len(tokens) for tokens, _ in documents)
    shape = (len(documents), longest)
    found = {
        "input_ids": torch.zeros(shape, dtype=torch.int64),
        "attention_mask": torch.zeros(shape, dtype=torch.int64),
    }
    found["labels"] = torch.full(shape, IGNORED)
    for row, (tokens, labels) in enumerate(documents):
        found["input_ids"][row, : len(tokens)], found["labels"][row, : len(tokens)] = tokens, labels
        found["attention_mask"][row, : len(tokens)] = 1
    return found


def theirs(
    run: Run,
    chosen: argparse.Namespace,
    name: str,
    batches: Sequence[Any],
    work: Sequence[tuple[int, int]],
    compiled: bool,
) -> Measured:
    """The library's figures."""
    from mplug_huggingface_format.model_config import config_of
    from transformers import AutoConfig, AutoModelForMaskedLM

    config = AutoConfig.for_model(**config_of(run.config))
    for field in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        if hasattr(config, field):
            setattr(config, field, 0.0)
    dtype = torch.bfloat16 if run.config.trainer.precision == "bf16" else torch.float32
    with torch.device(run.device):
        model = AutoModelForMaskedLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    model.train()
    called = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=run.device == "cuda")

    def step(batch: dict[str, Tensor]) -> Tensor:
        moved = {name: x.to(run.device, non_blocking=True) for name, x in batch.items()}
        loss: Tensor = called(**moved).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batches = [pinned(run, batch) for batch in batches]
    return measured(f"transformers, sdpa, {name}", step, batches, work, run, chosen.steps)


def freed(run: Run) -> None:
    """Give the memory of the participant before back."""
    gc.collect()
    torch.compiler.reset()
    if run.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> None:
    """Measure all and print the table."""
    chosen = options()
    run = run_of(chosen)
    print(f"{'':44}{'tokens/s':>12}{'TFLOP/s':>10}{'MFU':>10}{'GiB':>9}")
    found, batches, work = ours(run, chosen)
    print(found.row, flush=True)
    table = [found]
    cases: list[tuple[str, list[Any], bool]] = [
        ("padded to the longest", [rows_of(batch, None) for batch in batches], False),
        (f"compiled, padded to {chosen.length}", [rows_of(batch, chosen.length) for batch in batches], True),
    ]
    for name, rows, compiled in cases:
        freed(run)
        table.append(theirs(run, chosen, name, rows, work, compiled))
        print(table[-1].row, flush=True)
    best = max(one.rate for one in table[1:])
    if chosen.full:
        whole = [{"input_ids": batch["tokens"], "labels": batch["labels"]} for batch in batches]
        for compiled in (False, True):
            freed(run)
            table.append(theirs(run, chosen, f"{'compiled, ' * compiled}no padding", whole, work, compiled))
            print(table[-1].row, flush=True)
    print(f"ratio of tokens/s to the library's faster loop: {found.rate / best:.2f}")
    if chosen.out:
        Path(chosen.out).write_text(json.dumps([asdict(one) for one in table]))


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="bert", choices=["bert", "modernbert"])
    parser.add_argument("--preset", default="large")
    parser.add_argument("--attention", default="auto", help="kernel of mplug's attention; auto: the default run's")
    parser.add_argument("--kernels", default="", help="mplug's default kernels, such as triton")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=32, help="rows of a step")
    parser.add_argument("--documents", type=int, default=4, help="documents of a row")
    parser.add_argument("--batches", type=int, default=4, help="number of different batches")
    parser.add_argument("--steps", type=int, default=10, help="measured steps")
    parser.add_argument("--full", action="store_true", help="also the library on rows without padding")
    parser.add_argument("--set", action="append", default=[], help="a setting of mplug's run, as in mplug train")
    parser.add_argument("--out", help="file for the figures, in JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
