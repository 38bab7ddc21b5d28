"""The speed of a model that sees on several devices, with pictures of equal and of unequal sizes, balanced and not.

    python benchmarks/balance.py [--layout zero2] [--preset 3-2b] [--attention sdpa] [--steps 10] [--rounds 3] [--set X]
    python benchmarks/balance.py --preset tiny --length 256 --median 8 --largest 32 --text 16 --steps 2 \\
        --layout dp2 --set trainer.compile=never   (on a CPU, for a test)

In each step, a rank trains on one packed sample. Its documents are texts; some of them begin with a picture. Picture
sizes and text lengths of the unequal samples are log-normal. The variants take turns within one process per device:

    equal        all pictures have one size: as many pictures, patches and tokens in a sample as unequal ones on average
    same         the unequal samples, but all ranks have the same one in a step, so no rank waits for another
    unbalanced   the unequal samples; every rank encodes its own pictures
    balanced     the same samples with `parallel.balance`

'same', 'unbalanced' and 'balanced' compute exactly the same FLOPs. 'equal' has as many patches and tokens, but fewer
FLOPs: the attention of a large picture costs more than that of several small ones. So compare TFLOP/s, too.

Steps include the exchange of pictures, the copy to the device, clipping and AdamW. The samples are made before. The
first round compiles and allocates, and does not count. The last line is JSON: the figures are those of all ranks
together, and the ratios to 'equal' are medians over rounds.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mplug.commands import (
    Registry,
    Send,
    among,
    build,
    choose_device,
    default_settings,
    from_mapping,
    launch,
    launched,
    merge,
    peak_memory_gib,
    peak_tflops,
    prepare,
    read_assignments,
    resolve,
    supervisor_of,
)
from mplug.contracts.micro_batch import IGNORED, MicroBatch
from mplug.run.run import Run
from mplug.training.assembly import Parts
from mplug.training.batch_parts import own_part
from mplug.training.feed import Feed
from mplug_compile import compiled_graphs
from mplug_estimates import timed

VARIANTS = ("equal", "same", "unbalanced", "balanced")
LEAST = 4
"""Squares of patches of the smallest picture."""
MISFITS = 4
"""Documents without room in a sample after which it ends; one document of text fills it up."""


@dataclass(frozen=True)
class Document:
    """A picture of rows by columns of squares of patches, each a token, and the text behind it; 0 by 0: no picture."""

    rows: int
    columns: int
    text: int

    @property
    def squares(self) -> int:
        """The placeholders of the picture."""
        return self.rows * self.columns

    @property
    def tokens(self) -> int:
        """Tokens, with those around a picture."""
        return self.text + (self.squares + 2 if self.squares else 0)


def near_square(number: int) -> tuple[int, int]:
    """The rows and columns of a picture of about this many squares, that is at most twice as wide as high."""
    sides = [(rows, max(rows, round(number / rows))) for rows in range(1, math.isqrt(number) + 1)]
    return min((one for one in sides if one[1] <= 2 * one[0]), key=lambda one: abs(one[0] * one[1] - number))


def unequal(draw: random.Random, chosen: argparse.Namespace) -> list[Document]:
    """The documents of a sample with pictures and texts of long-tailed sizes; text fills the sample up."""
    found, left, misfits = list[Document](), chosen.length, 0
    while left and misfits < MISFITS:
        squares = min(chosen.largest, max(LEAST, int(draw.lognormvariate(math.log(chosen.median), chosen.sigma))))
        squares *= draw.random() < chosen.pictures
        text = max(1, int(draw.lognormvariate(math.log(chosen.text), chosen.sigma)))
        document = Document(*(near_square(squares) if squares else (0, 0)), text)
        if document.tokens > left:
            misfits += 1
        else:
            found.append(document)
            left -= document.tokens
    return [*found, Document(0, 0, left)] if left else found


def equal(samples: Sequence[Sequence[Document]], length: int) -> list[Document]:
    """A sample of equal documents with as many pictures and squares as the given samples have on average."""
    squares = sum(one.squares for sample in samples for one in sample) / len(samples)
    number = round(sum(one.squares > 0 for sample in samples for one in sample) / len(samples))
    rows, columns = near_square(round(squares / number))
    text = length // number - rows * columns - 2
    found = [Document(rows, columns, text) for _ in range(number)]
    left = length - sum(one.tokens for one in found)
    return [*found[:-1], Document(rows, columns, text + left)]


def micro_batch(run: Run, sample: Sequence[Document], number: int) -> MicroBatch:
    """A micro batch of one sample: noise and random tokens."""
    processor: Any = run.processor
    vision, generator = processor.vision, torch.Generator().manual_seed(number)
    side = vision.patch_size * vision.merge_size
    free = min(processor.placeholders | {vision.start_token, vision.end_token})
    tokens, media = list[int](), []
    for document in sample:
        if document.squares:
            size = (1, document.rows * side, document.columns * side, 3)
            medium = processor.prepare(torch.randint(256, size, generator=generator, dtype=torch.uint8))
            if medium.rows != document.squares * vision.merge_size**2:
                raise ValueError(f"the processor resizes a picture of {size[1]} x {size[2]} pixels")
            media.append(medium)
            tokens += medium.tokens
        tokens += torch.randint(free, (document.text,), generator=generator).tolist()
    ids, lengths = torch.tensor([tokens]), torch.tensor([[document.tokens for document in sample]])
    starts = (lengths.cumsum(1) - lengths).repeat_interleave(lengths[0], dim=1)
    labels = ids.roll(-1, dims=1)
    labels[:, lengths.cumsum(1)[0] - 1] = IGNORED
    labels.masked_fill_(torch.isin(labels, torch.tensor(sorted(processor.placeholders))), IGNORED)
    return {
        "tokens": ids,
        "labels": labels,
        "positions": torch.arange(len(tokens))[None] - starts,
        "sample_ids": torch.tensor([number]),
        "document_lengths": lengths,
        **processor.entries_of(ids, [media], lengths),
    }


def flops_of(parts: Parts, batch: MicroBatch) -> int:
    """The FLOPs of a training step on a micro batch."""
    lengths = batch["document_lengths"]
    flops = parts.model.flops.of(int(lengths.sum()), int(lengths.square().sum()))
    passes = parts.model.stream_passes.items()
    return flops + sum(one.flops.of(int(batch[name].sum()), int(batch[name].square().sum())) for name, one in passes)


def run_of(chosen: argparse.Namespace) -> Run:
    """The prepared run."""
    settings: dict[str, object] = {
        "model": {"name": "qwen-vl", "preset": chosen.preset, "vision": {"min_pixels": 1}},  # no picture is resized
        "data": {"name": "mock", "media": 1, "documents": 2},
        "kernels": {"attention": chosen.attention},
        "parallel": {"layout": chosen.layout, "balance": True},
        "trainer": {"seq_length": chosen.length, "micro_batch_size": 1, "steps": 1000},
    }
    changes = merge(from_mapping(settings, "benchmark"), read_assignments(chosen.set))
    size = prepare(resolve(Registry(), default_settings(), changes)).mesh.world_size
    changes = merge(changes, read_assignments([f"trainer.global_batch_size={size}"]))
    return prepare(resolve(Registry(), default_settings(), changes))


class Participant:
    """One process of the measurement."""

    def __init__(self, run: Run, parts: Parts, chosen: argparse.Namespace, started: float) -> None:
        self.run, self.parts, self.chosen, self.started = run, parts, chosen, started
        draw = random.Random(chosen.seed)
        self.samples = [unequal(draw, chosen) for _ in range(chosen.steps)]
        self.of_equal = equal(self.samples, chosen.length)
        self.batches = {name: self._made(name) for name in VARIANTS[:3]}
        self.batches["balanced"] = self.batches["unbalanced"]
        cut = partial(own_part, plan=parts.model.plan, mesh=run.mesh, rank=run.rank)
        apart = Feed(parts.train_loader.loader, run.device, None, cut)
        self.feeds = dict.fromkeys(VARIANTS, apart) | {"balanced": parts.train_loader}
        self.losses = list[Tensor]()

    def say(self, text: str) -> None:
        """Print progress on rank 0."""
        if self.run.rank == 0:
            print(f"[{time.time() - self.started:5.0f} s] {text}", flush=True)

    def _made(self, variant: str) -> list[MicroBatch]:
        """The micro batches of this rank: in every round, each sample occurs as often in 'same' as in 'unbalanced'."""
        shift = 0 if variant == "same" else self.run.rank
        chosen = [(number + shift) % len(self.samples) for number in range(len(self.samples))]
        return [micro_batch(self.run, self.of_equal if variant == "equal" else self.samples[at], at) for at in chosen]

    def step(self, variant: str, batch: MicroBatch) -> None:
        """Train on a micro batch."""
        self.run.step += 1
        self.parts.stepper.forward_backward(self.feeds[variant].step_of([batch]), self.run.step)
        self.losses.append(self.parts.stepper.update(1e-5, 0.0).loss)

    def turn(self, variant: str) -> float:
        """The seconds of a round of a variant: of the slowest rank."""
        batches = iter(self.batches[variant])
        dist.barrier()
        seconds = sum(timed(lambda: self.step(variant, next(batches)), self.chosen.steps, self.run.device))
        slowest: float = max(self.run.gathered(seconds))
        return slowest

    def work(self, variant: str) -> dict[str, float]:
        """What all ranks compute in a round, and how unequally: patches and FLOPs of the ranks' own pictures."""
        own = self.batches[variant]
        patches = [int(batch["patch_lengths"].sum()) for batch in own]
        tokens, flops = sum(batch["tokens"].numel() for batch in own), [flops_of(self.parts, batch) for batch in own]
        of_ranks = self.run.gathered((tokens, patches, flops))
        by_step = list(zip(*(patches for _, patches, _ in of_ranks), strict=True))
        return {
            "tokens": sum(tokens for tokens, _, _ in of_ranks),
            "patches": sum(map(sum, by_step)),
            "flops": sum(sum(flops) for _, _, flops in of_ranks),
            "imbalance": sum(map(max, by_step)) * len(of_ranks) / sum(map(sum, by_step)),
        }

    def measured(self) -> dict[str, Any]:
        """All figures; every variant runs its first round before the others."""
        work = {variant: self.work(variant) for variant in VARIANTS}
        for variant in VARIANTS:
            own = work[variant]
            self.say(
                f"{variant}: {own['tokens']:,} tokens, {own['patches']:,} patches and {own['flops'] / 1e12:,.1f} TFLOP "
                f"in a round; the rank with most of the patches has {own['imbalance']:.3f} times the mean"
            )
        for variant in VARIANTS:
            self.say(f"{variant}: the first round, with compilation, took {self.turn(variant):.1f} s")
        compiled, seconds = compiled_graphs(), {variant: list[float]() for variant in VARIANTS}
        for number in range(self.chosen.rounds):
            for variant in VARIANTS:
                seconds[variant].append(self.turn(variant))
            turns = ", ".join(f"{variant} {seconds[variant][-1]:.3f} s" for variant in VARIANTS)
            self.say(f"round {number + 1}/{self.chosen.rounds}: {turns}")
        return {
            "device": torch.cuda.get_device_name() if self.run.device == "cuda" else "cpu",
            "layout": self.chosen.layout,
            "graphs": compiled_graphs(),
            "graphs_in_measured_steps": compiled_graphs() - compiled,
            "memory_gib": max(self.run.gathered(peak_memory_gib(self.run.device))),
            "peak_tflops": peak_tflops(self.run.device),
            "loss": float(self.losses[-1]),
            "variants": {
                name: {**work[name], "seconds": seconds[name], **figures(work[name], work["equal"], seconds, name)}
                for name in VARIANTS
            },
        }


def figures(
    work: dict[str, float], of_equal: dict[str, float], seconds: dict[str, list[float]], name: str
) -> dict[str, float]:
    """The rates of a variant, and its ratios to 'equal'."""
    speed = median(equal / own for own, equal in zip(seconds[name], seconds["equal"], strict=True))
    rates = {f"{unit}_per_s": work[unit] / median(seconds[name]) for unit in ("tokens", "patches", "flops")}
    ratios = {f"ratio_of_{unit}": speed * work[unit] / of_equal[unit] for unit in ("tokens", "patches", "flops")}
    return {**rates, **ratios}


def measure(chosen: argparse.Namespace, started: float, send: Send | None = None) -> dict[str, Any]:
    """The work of one process."""
    run = run_of(chosen)
    run.device = choose_device(run.config)
    with among(launched(), run, supervisor_of(run), send):
        parts = build(run)
        one = Participant(run, parts, chosen, started)
        one.say("the model is built, and the samples are made")
        return one.measured()


def main() -> None:
    """Measure, and print the table and a line of JSON."""
    chosen, started = options(), time.time()
    size = run_of(chosen).mesh.world_size
    if size < 2:
        raise SystemExit(f"layout '{chosen.layout}' has one rank, and nothing to balance; use dp2 or zero2")
    found = launch(size, measure, chosen, started)
    peak = found["peak_tflops"]
    print(f"{'':14}{'tokens/s':>12}{'patches/s':>12}{'TFLOP/s':>10}{'MFU':>8}  of equal: tokens  patches  FLOPs")
    for name, one in found["variants"].items():
        rate = one["flops_per_s"] / 1e12
        mfu = f"{100 * rate / peak / size:7.1f}%" if peak else f"{'':8}"
        ratios = "".join(f"{one[f'ratio_of_{unit}']:9.3f}" for unit in ("tokens", "patches", "flops"))
        print(f"{name:14}{one['tokens_per_s']:12,.0f}{one['patches_per_s']:12,.0f}{rate:10.1f}{mfu}{'':7}{ratios}")
    print(f"{found['device']}: {found['memory_gib']:.1f} GiB at most, {found['graphs']} graphs")
    print(json.dumps(found))
    if chosen.out:
        chosen.out.write_text(json.dumps(found))


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layout", default="zero2", help="a layout with data-parallel ranks")
    parser.add_argument("--preset", default="3-2b")
    parser.add_argument("--attention", default="sdpa", help="kernel of the attention")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sample")
    parser.add_argument("--median", type=int, default=300, help="median number of tokens of a picture")
    parser.add_argument("--largest", type=int, default=4096, help="largest number of tokens of a picture")
    parser.add_argument("--pictures", type=float, default=0.6, help="share of the documents that have a picture")
    parser.add_argument("--text", type=int, default=160, help="median number of tokens of the text of a document")
    parser.add_argument("--sigma", type=float, default=1.5, help="standard deviation of the logarithms of both numbers")
    parser.add_argument("--steps", type=int, default=10, help="steps of a round, each with another sample")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sizes")
    parser.add_argument("--set", action="append", default=[], help="a setting of the run, as in mplug train")
    parser.add_argument("--out", type=Path, help="file for the figures, in JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
