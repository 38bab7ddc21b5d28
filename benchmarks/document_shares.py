"""How unequal the work of 64 ranks is under context parallelism, with packed documents of long-tailed lengths.

    python benchmarks/document_shares.py [--ranks 64] [--cp 2 4 8 16] [--length 131072] [--samples 8] [--steps 5]

No run and no GPU: it packs lengths as the data plugin `packed` does, divides the samples of a step over data-parallel
groups as `parallel.balance` does, and each sample over the ranks of a group as `parallel.cp.divide` does. Every group
has the same number of samples in a step, one in a micro batch. The ranks of a group wait for each other in every micro
batch, and the groups once in a step. A figure is the time of the slowest group, by FLOPs, over the mean work of ranks.
'Divided' is the part of the tokens in documents on more than one rank, whose keys are exchanged.
"""

import json
from collections.abc import Sequence
from statistics import mean

from mplug_cp.division import divided, work_of
from mplug_cp.zigzag import zigzag
from sample_balance import TAILS, flops_of, parser_of, samples_of

from mplug.layout.mesh import Ranges
from mplug_streams.work_shares import dealt

DIVISIONS = ("sequence", "documents")


def division(lengths: Sequence[int], cp: int, equal_length: int, divide: str) -> tuple[Ranges, ...]:
    """The ranges of each rank of a group."""
    if divide == "documents":
        return divided(tuple(lengths), cp, equal_length)
    return tuple(zigzag(sum(lengths), cp, rank) for rank in range(cp))


def on_several(lengths: Sequence[int], ranges: Sequence[Ranges]) -> int:
    """The tokens of documents that lie on more than one rank."""
    found, begin = 0, 0
    for length in lengths:
        holders = sum(any(part.start < begin + length and part.stop > begin for part in held) for held in ranges)
        found += length if holders > 1 else 0
        begin += length
    return found


def filled(sample: Sequence[int], length: int) -> list[int]:
    """A sample with its unfilled rest as a document, as the loader has it."""
    rest = length - sum(sample)
    return [*sample, rest] if rest else list(sample)


def figures(samples: Sequence[Sequence[int]], groups: int, cp: int, equal_length: int) -> dict[str, float]:
    """The imbalance of a step by division and balance, and the divided tokens."""
    whole = [work_of(one, (range(sum(one)),), equal_length) for one in samples]
    each, found = len(samples) // groups, dict[str, float]()
    shares = {"": [range(n * each, (n + 1) * each) for n in range(groups)], " balance": dealt(whole, groups, 1)}
    for divide in DIVISIONS:
        ranges = [division(one, cp, equal_length, divide) for one in samples]
        slowest = [
            max(work_of(one, held, equal_length) for held in of) for one, of in zip(samples, ranges, strict=True)
        ]
        for name, share in shares.items():
            time = max(sum(slowest[one] for one in own) for own in share)
            found[divide + name] = time * groups * cp / sum(whole)
        several = sum(on_several(one, of) for one, of in zip(samples, ranges, strict=True))
        found[f"divided {divide}"] = several / sum(map(sum, samples))
    return found


def main() -> None:
    """Print a table for each distribution, and all figures as JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--cp", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--samples", type=int, default=8, help="of a data-parallel group in a step")
    parser.add_argument("--steps", type=int, default=5)
    chosen = parser.parse_args()
    flops, found = flops_of(chosen), {}
    equal_length = flops.per_token // flops.per_squared_length
    print(f"a document of {equal_length:,} tokens has as much work in attention as outside of it")
    for name, (median, sigma) in TAILS.items():
        most = chosen.ranks // min(chosen.cp) * chosen.samples * chosen.steps
        samples = [filled(one, chosen.length) for one in samples_of(chosen, median, sigma, most)]
        print(f"{name}: median {median}, sigma {sigma}\n{'':6}{'sequence':>10}{'+ balance':>11}", end="")
        print(f"{'documents':>11}{'+ balance':>11}{'divided':>10}")
        for cp in chosen.cp:
            groups = chosen.ranks // cp
            number = groups * chosen.samples
            steps = [samples[step * number : (step + 1) * number] for step in range(chosen.steps)]
            rows = [figures(step, groups, cp, equal_length) for step in steps]
            of = {key: mean(row[key] for row in rows) for key in rows[0]}
            found[f"{name} cp{cp}"] = of
            print(f"cp{cp:<4}{of['sequence']:10.3f}{of['sequence balance']:11.3f}{of['documents']:11.3f}", end="")
            print(f"{of['documents balance']:11.3f}{of['divided documents']:10.1%}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
