"""Write docs/layouts.md: every parallel strategy alone and beside every other, against one process.

python docs/matrix.py          every pair, in fp64 and fp32: some 5 minutes on 2 cores
python docs/matrix.py tp cp    these strategies only, printed and not written
"""

import sys
from itertools import combinations
from pathlib import Path
from time import monotonic
from unittest import SkipTest

from rich.console import Console
from rich.progress import track

from mplug.registry.entry_points import Registry
from mplug_testing.harness import EXACT, STEPS, largest_error, train_steps
from mplug_testing.parity import error_of

PAGE = Path(__file__).parent / "layouts.md"
DENSE = {"model.num_kv_heads": 2}
EXPERTS = {
    "model.name": "mixtral",
    "model.num_layers": 4,
    "model.ffn_hidden_size": 24,
    "model.num_experts": 4,
    "model.num_shared_experts": 1,
    "model.qk_norm": True,
    "model.vocab_size": 259,
}
DIVIDE_EXPERTS = {"ep", "etp"}
REQUESTED = (PAGE.parent.parent / "requirements-optional.txt").read_text().splitlines()
ON_REQUEST = {line.rpartition("/")[2] for line in REQUESTED if line.startswith("-e plugins/parallel/")}
"""Strategies that the page omits, because it does not depend on what is installed."""
TRAIN_OTHERWISE = ("diloco",)
"""Strategies whose runs are not those of one process."""
TEXT = """# Layouts

<!-- Written by `python docs/matrix.py`: do not edit. -->

The table compares each strategy with one process: alone with degrees 2 and 4, and with degree 2 beside degree 2 of
every other strategy. The runs are {steps} steps of a tiny decoder on CPUs: 4 blocks, ragged labels, at least 2 micro
batches on each data-parallel rank; 4 experts and a shared expert where the layout shards experts.

A cell has two figures: the largest relative difference in fp64, and the same in fp32. The difference covers the loss,
the gradient norm and every gradient of every step. A gradient smaller than a thousandth of the global norm is compared
relative to that thousandth. In fp64 a layout above 1e-10 is wrong: rounding is some 1e-15 there. The fp32 figures show
what the same layout rounds. One process in fp32 differs from one process in fp64 by {dense:.1e}, and with experts by
{experts:.1e}.

A number in brackets is a layout that is refused before any process starts. The reasons are below the table.

The strategies for experts (ep, etp) have their own view of the mesh. It folds over the ranks of the other strategies,
so `ep2tp2` runs on 2 ranks. `ep2etp2` runs on 4 ranks, because ep and etp are in the same view, and `ep2pp2` runs on 4,
because pipeline stages are in both views. [The README of ep](../plugins/parallel/ep/README.md) explains the views.
[parity.md](parity.md) explains the comparison.

The strategy `deepspeed`, which is installed on request, is not in the table: DeepSpeed does not compute in fp64.
[parallel.md](parallel.md#deepspeed) states what its tests compare.

Neither is `diloco`: its workers train models of their own, which is not the run of one process. Its tests compare it
with a simulation of the workers in one process, alone and around every other strategy.

"""


def main(chosen: list[str]) -> None:
    """Run the layouts, and write the page, or print it where strategies are named."""
    names = [
        name for name in Registry().names("parallel") if name in chosen or name not in (*ON_REQUEST, *TRAIN_OTHERWISE)
    ]
    unknown = [name for name in chosen if name not in names]
    if unknown:
        sys.exit(f"no strategy '{unknown[0]}' is installed; there are {', '.join(names)}")
    began, refused = monotonic(), {}
    rounding = {name: distance(settings) for name, settings in (("dense", DENSE), ("experts", EXPERTS))}
    page = TEXT.format(steps=STEPS, **rounding) + table(chosen or names, refused)
    page += "".join(f"\n{number}. `{layout}`: {reason}" for number, (layout, reason) in enumerate(refused.items(), 1))
    page = f"{page.rstrip()}\n"
    if chosen:
        print(page)
    else:
        PAGE.write_text(page)
        print(f"{PAGE} written in {(monotonic() - began) / 60:.1f} minutes")


def distance(settings: dict[str, object]) -> float:
    """The largest relative difference of one process in fp32 from one process in fp64."""
    alone, exact = (train_steps({**settings, "trainer.precision": precision}) for precision in ("fp32", "fp64"))
    return largest_error([alone], exact)


def table(names: list[str], refused: dict[str, str]) -> str:
    """The matrix as Markdown; layouts that are refused, and why, go into `refused` in their order."""
    words = {(a, b): f"{a}2{b}2" for a, b in combinations(names, 2)}
    words |= {(name, degree): f"{name}{degree}" for name in names for degree in ("2", "4")}
    cells = {}
    for key, word in track(sorted(words.items(), key=lambda item: item[1]), "layouts", console=Console(stderr=True)):
        cells[key] = cell(word, set(key) & DIVIDE_EXPERTS != set(), refused)
    rows = [["", "2 ranks", "4 ranks", *(f"{name} 2" for name in names[1:])]]
    for place, name in enumerate(names):
        pairs = [cells.get((name, other), "") if other in names[place + 1 :] else "·" for other in names[1:]]
        rows.append([f"**{name}**", cells[name, "2"], cells[name, "4"], *pairs])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def cell(word: str, divides_experts: bool, refused: dict[str, str]) -> str:
    """The figures of a layout in fp64 and fp32, or the number of its refusal."""
    settings = EXPERTS if divides_experts else DENSE
    try:
        exact, rounded = (error_of({**settings, "trainer.precision": one}, word) for one in ("fp64", "fp32"))
    except SkipTest as reason:
        refused[word] = str(reason).partition("is refused: ")[2]
        return f"({len(refused)})"
    return f"{exact:.1e} / {rounded:.1e}" if exact <= EXACT else f"**{exact:.1e} / {rounded:.1e}**"


if __name__ == "__main__":
    main(sys.argv[1:])
