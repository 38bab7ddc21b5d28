"""Write docs/pairs.md and tests/data/pairs.json: cases in which all features occur in pairs, and what is refused.

python docs/pairs.py           keeps the cases of the file that mplug accepts, and adds what covers the other pairs
python docs/pairs.py --anew    makes all cases anew

`pytest --wide pairs` runs the cases.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from covering import Array, Case, Features, Generator, all_pairs, default_case  # noqa: E402
from pair_features import (  # noqa: E402
    ARRAYS,
    COSTLY,
    FEATURES,
    GENERAL,
    HEALED,
    MEANING,
    PRODUCT,
    QUICK,
    OwnArray,
    small_enough,
)
from pair_probe import refusal_of, world_size_of  # noqa: E402

PAGE, DATA = ROOT / "docs" / "pairs.md", ROOT / "tests" / "data" / "pairs.json"
SEED = 38
TEXT = """# Pairs of features

<!-- Written by `python docs/pairs.py`: do not edit. -->

Read this page to find out which combinations of features are tested together, and which ones mplug refuses. A defect in
the combination of two features does not show in a test of either feature. So a generated list of cases contains every
pair of values of the features below, unless mplug refuses the pair.

A case is a run of two steps of a tiny model under the case's layout, and its resume after the first step. It is
compared with one process in fp64, in plain torch, without a compiler, recomputation or strategy. This process has one
micro batch; if experts have a capacity, for which the tokens of a micro batch compete, it has micro batches of the
case's size. The bound is 1e-10, relative, for the losses, the gradient norms, the statistics, the gradients that the
sinks hold (each copy on each rank), the movement of the master weights, and the loss of an evaluation.

A case that is healed does not resume: a rank is killed in the second step, and the other processes do this step again
from the copies in their memory ([checkpoints](checkpoints.md#going-on-after-a-death)). With `--wide disks`, the machine
of this rank is lost as well, and they continue from the disk of another one
([local checkpoints](checkpoints.md#local-checkpoints)).

| | |
|---|---|
| features | {features} |
| values | {values} |
| pairs of values | {pairs} |
| of these refused | {refused} |
| cases that contain all others | {cases} |
| ranks of a case | {ranks} |
| cases of the product of {product} | {product_cases} |
{own_cases}
| cases that the quick tests run | {quick} |

The quick tests run uncompiled cases of tp, cp, pp, ep, fsdp and zero. `pytest --wide pairs` runs the other cases. With
`MPLUG_PAIRS=FILE` each case appends a line of JSON with its largest errors to the file.

A case has at most two parallel strategies, so at most four ranks. The reference of a case with DiLoCo's workers has a
process for each worker. Seven samples are evaluated, which data-parallel ranks fill up to eight. The same cases change
their layout between two steps in the wide set `relayout`. Not in the list:

- lower precisions: tests of their own bound their differences from fp64 (the wide set `precision`);
- the backend `inductor`, which compiles the same graphs as `aot_eager` (the wide set `compile`);
- `deepspeed`, which does not compute in fp64;
- the optimizer `lion`: its sign turns the rounding of a gradient that is zero into a whole update.

## Features

The first value is the default.

{table}

Some families have an array of their own, with features of their own and some of the others.

{own_tables}

## Found

Failures of the list, when a feature came into it. Each is corrected, and has a test of its own.

| features | failure |
|---|---|
| multi-token prediction + `aot_eager` | the head lost the gradient of the main loss (relative error 0.98) |
| multi-token prediction + tied + stages that share the table | ranks added gradients of other parameters (error 1.6) |
| LoRA + full recomputation + a schedule that splits backward | recomputed adapters took another path; the run ended |
| LoRA + selective recomputation + `aot_eager` | torch's partitioner failed; the run ended |
| frozen first stage + ZeRO stage 2 + `zb-v` | refused after the launch, by another rank than the first |
| distillation + ZeRO stage 2 | the head's gradients had no memory; the run ended |
| rewards + data-parallel ranks that do not divide the samples of an evaluation | the loss had the pairs of samples \
that only fill up (error 0.045) |
| DPO or rewards + weights of losses | the weights had no effect; refused now |

## Refused

Each line is a smallest set of values that mplug refuses before any process starts, with every other feature at its
default. The list is not written by hand: the generator tries cases, and reduces what is refused.

{reasons}

{own_reasons}
"""


def main() -> None:
    """Make the cases, and write both files."""
    began = monotonic()
    before = json.loads(DATA.read_text()) if DATA.exists() and "--anew" not in sys.argv else {}
    with ProcessPoolExecutor(mp_context=get_context("forkserver")) as pool:
        array = covering(FEATURES, Probe(pool), before.get("pairs", []), before.get("refused", []))
        own = {
            name: covering(one.features, Probe(pool, name), before.get(name, []), before.get(f"{name} refused", []))
            for name, one in ARRAYS.items()
        }
        second = product_cases(pool)
    data: dict[str, Any] = {"pairs": array.cases, "product": second, **{name: one.cases for name, one in own.items()}}
    data |= {"refused": entries_of(array), **{f"{name} refused": entries_of(one) for name, one in own.items()}}
    lists = [f'"{name}": [\n' + ",\n".join(map(json.dumps, listed)) + "\n]" for name, listed in data.items()]
    ranks = Counter(map(world_size_of, array.cases))
    data["ranks"] = {str(number): ranks[number] for number in sorted(ranks)}
    DATA.write_text("{\n" + ",\n".join([*lists, f'"ranks": {json.dumps(data["ranks"])}']) + "\n}\n")
    PAGE.write_text(page(data))
    of_own = ", ".join(f"{len(one.cases)} of {name}" for name, one in own.items())
    counts = f"{len(array.cases)} cases of pairs, {len(second)} of the product, {of_own}"
    print(f"{counts} in {monotonic() - began:.0f} s")


@dataclass
class Probe:
    """Asks mplug about cases, in this process or in those of a pool. `array`: the array whose cases they are."""

    pool: Executor
    array: str | None = None

    def __call__(self, case: Case) -> str:
        """The refusal of a case; empty if mplug accepts it."""
        return refusal_of(self.whole(case))

    def whole(self, case: Case) -> Case:
        """The case with the defaults of the features that its array lacks."""
        return case if self.array is None else ARRAYS[self.array].whole(case)

    def of_all(self, cases: list[Case]) -> list[str]:
        """The refusals of many cases."""
        return [*self.pool.map(refusal_of, map(self.whole, cases), chunksize=8)]


def covering(features: Features, probe: Probe, kept: list[Case], refused: list[dict[str, Any]]) -> Array:
    """The array of some features, beginning with the cases that are kept; they have the defaults of new features."""
    whole = [{**default_case(features), **case} for case in kept]
    generator = Generator(features, probe, small_enough, COSTLY, SEED, probe.of_all)
    array = generator.make(whole, [entry["values"] for entry in refused])
    if array.uncovered:
        sys.exit(f"no accepted case contains the pairs {[sorted(pair) for pair in array.uncovered]}")
    return array


def entries_of(array: Array) -> list[dict[str, Any]]:
    """What an array refuses, in a fixed order, with the reasons."""
    refused = sorted(array.refused.items(), key=lambda item: (len(item[0]), sorted(item[0])))
    return [{"values": dict(sorted(values)), "reason": reason} for values, reason in refused]


def product_cases(pool: Executor) -> list[Case]:
    """Every combination of the values of `PRODUCT`, each in a family that has them all; the rest is the default."""
    random, cases = Random(SEED), []
    for values in product(*PRODUCT.values()):
        own = dict(zip(PRODUCT, values, strict=True))
        case = {**default_case(FEATURES), **own, "family": random.choice(sorted(GENERAL))}
        case["micro batches"] = random.choice(FEATURES["micro batches"][1:])
        case["resume"] = random.choice([value for value in FEATURES["resume"] if value not in HEALED])
        cases.append(case)
    for case, reason in zip(cases, Probe(pool).of_all(cases), strict=True):
        if reason:
            sys.exit(f"{case} is refused: {reason}")
    return cases


def page(data: dict[str, Any]) -> str:
    """The page as Markdown, from the cases and what is refused."""
    pairs, sets = all_pairs(FEATURES), [frozenset(entry["values"].items()) for entry in data["refused"]]
    return TEXT.format(
        features=len(FEATURES),
        values=sum(map(len, FEATURES.values())),
        pairs=len(pairs),
        refused=sum(any(values <= pair for values in sets) for pair in pairs),
        cases=len(data["pairs"]),
        ranks=", ".join(f"{count} cases on {number}" for number, count in data["ranks"].items()),
        product=" × ".join(PRODUCT),
        product_cases=len(data["product"]),
        quick=len(QUICK),
        own_cases="\n".join(
            f"| cases of {families_of(array)}, which contain all pairs of their features | {len(data[name])} |"
            for name, array in ARRAYS.items()
        ),
        table=table_of(FEATURES, MEANING),
        own_tables="\n\n".join(map(own_table, ARRAYS.values())),
        reasons=refusals(data["refused"]),
        own_reasons="\n\n".join(
            f"Of {families_of(array)}:\n\n{refusals(data[f'{name} refused'])}" for name, array in ARRAYS.items()
        ),
    )


def families_of(array: OwnArray) -> str:
    """The families of an array."""
    return ", ".join(f"`{family}`" for family in array.features["family"])


def own_table(array: OwnArray) -> str:
    """What is different in the families of an array, and its features."""
    shared = ", ".join(name for name in array.features if name not in array.meaning)
    return f"{families_of(array)}: {array.about}. Also: {shared}.\n\n{table_of(array.features, array.meaning)}"


def table_of(features: Features, meanings: Mapping[str, str]) -> str:
    """The table of the features with a meaning: what each means, and its values."""
    lines = [f"| {name} | {meaning} | {', '.join(features[name])} |" for name, meaning in meanings.items()]
    return "\n".join(["| feature | meaning | values |", "|---|---|---|", *lines])


def refusals(entries: list[dict[str, Any]]) -> str:
    """The table of refusals."""
    return "\n".join(["| values | reason |", "|---|---|", *map(line_of, entries)])


def line_of(entry: dict[str, Any]) -> str:
    """A line of the table of refusals: the values, and the first sentence without the list of fields."""
    words = " + ".join(f"{name} `{value}`" for name, value in entry["values"].items())
    return f"| {words} | {entry['reason'].splitlines()[0].partition(' (fields: ')[0]} |"


if __name__ == "__main__":
    main()
