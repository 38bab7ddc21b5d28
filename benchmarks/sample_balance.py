"""How unequal the work of data-parallel ranks is with packed documents of long-tailed lengths, and with balance.

    python benchmarks/sample_balance.py [--ranks 64] [--length 131072] [--micro-batches 1 2 4 8 16] [--steps 10]

No run and no GPU: it packs lengths as the data plugin `packed` does, and divides the samples of a step as
`parallel.balance` does, by the FLOPs of a model's plan. 'A step' is the work of the rank with the most of a step over
the mean of ranks: ranks wait for each other once in a step (`dp`, `zero`). 'In turn' is the sum over micro batches of
the work of the slowest rank, over the mean: ranks wait in every micro batch (`fsdp`; pipelines about so). Before: the
global order. Below: what no division of whole samples can exceed, the heaviest sample over the mean of ranks. The
lengths are lognormal, cut at the length of a sample.
"""

import argparse
import json
import math
import random
from collections.abc import Sequence
from statistics import mean

from mplug.commands import Registry, build_model, default_settings, from_mapping, merge, prepare, resolve
from mplug.layout.work import Flops
from mplug_streams.work_shares import dealt, imbalance
from mplug_tokenization.packing import best_fit_decreasing

TAILS = {"short": (600, 1.5), "long": (2000, 1.8)}
"""Median length of a document in tokens, and standard deviation of the logarithm."""


def samples_of(chosen: argparse.Namespace, median: int, sigma: float, number: int) -> list[list[int]]:
    """The lengths of the documents of so many packed samples, in a random order."""
    draw = random.Random(chosen.seed)
    lengths, total = [], 0
    while total < number * chosen.length:
        lengths.append(max(16, min(chosen.length, int(draw.lognormvariate(math.log(median), sigma)))))
        total += lengths[-1]
    packed = best_fit_decreasing(lengths, chosen.length, chosen.length)
    draw.shuffle(packed)
    return [[lengths[one] for one in members] for members in packed][:number]


def in_turn(work: Sequence[int], shares: Sequence[Sequence[int]]) -> float:
    """The slowest rank of each micro batch of one sample, summed, over the mean of ranks."""
    slowest = sum(max(work[one] for one in batch) for batch in zip(*shares, strict=True))
    return slowest * len(shares) / sum(work)


def parser_of(description: str) -> argparse.ArgumentParser:
    """The options of a simulation: the ranks, the samples, and the model whose FLOPs are their work."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--length", type=int, default=131072, help="tokens of a sample")
    parser.add_argument("--model", default="llama")
    parser.add_argument("--preset", default="3.1-8b")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def flops_of(chosen: argparse.Namespace) -> Flops:
    """The FLOPs of the chosen model."""
    settings = {"model": {"name": chosen.model, "preset": chosen.preset}, "data": {"name": "mock"}}
    settings["trainer"] = {"seq_length": chosen.length}
    run = prepare(resolve(Registry(), default_settings(), merge({}, from_mapping(settings, "benchmark"))))
    return build_model(run).flops


def main() -> None:
    """Print the tables, and all figures as JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="of a rank, of a sample")
    parser.add_argument("--steps", type=int, default=10)
    chosen = parser.parse_args()
    flops, found = flops_of(chosen), {}
    for name, (median, sigma) in TAILS.items():
        number = chosen.ranks * max(chosen.micro_batches) * chosen.steps
        samples = samples_of(chosen, median, sigma, number)
        work = [sum(flops.of(one, one * one) for one in sample) for sample in samples]
        lengths = [one for sample in samples for one in sample]
        of_long = sum(one for one in lengths if 4 * one > chosen.length) / sum(lengths)
        print(
            f"{name}: median {median}, sigma {sigma}; {100 * of_long:.0f}% of the tokens in documents of more than a "
            f"quarter of a sample; the heaviest sample has {max(work) / mean(work):.2f} times the mean"
        )
        print(f"{'':15}  a step: before   after   in turn: before   after   below")
        for each in chosen.micro_batches:
            rows = []
            for step in range(min(chosen.steps, len(work) // (chosen.ranks * each))):
                own = work[step * chosen.ranks * each : (step + 1) * chosen.ranks * each]
                order = [range(rank * each, (rank + 1) * each) for rank in range(chosen.ranks)]
                after = dealt(own, chosen.ranks, 1)
                least = max(own) * chosen.ranks / sum(own)
                rows.append(
                    (
                        imbalance(own, order),
                        imbalance(own, after),
                        in_turn(own, order),
                        in_turn(own, after),
                        max(1.0, least),
                    )
                )
            figures = [mean(column) for column in zip(*rows, strict=True)]
            found[f"{name} {each}"] = figures
            before, after_, waiting, shorter, below = figures
            print(f"{each:3} micro batches {before:15.3f} {after_:7.3f} {waiting:17.3f} {shorter:7.3f} {below:7.3f}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
