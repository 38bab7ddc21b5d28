"""Write docs/layouts.md: every parallel strategy alone and beside every other, against one process.

python docs/matrix.py          every pair, some 10 minutes on 2 cores
python docs/matrix.py tp cp    these strategies only, printed and not written
"""

import sys
from itertools import combinations
from pathlib import Path
from time import monotonic
from unittest import SkipTest

from rich.console import Console
from rich.progress import track

from mplug.registry import Registry
from mplug.testing.parity import error_of

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
TEXT = """# Layouts

<!-- Written by `python docs/matrix.py`: do not edit. -->

Each strategy by itself, of 2 ranks and of 4, and 2 ranks of it beside 2 of each other one, against the same run in one
process, in fp32 on CPUs: 5 steps of a tiny decoder (4 blocks; with 4 experts and a shared one where the layout divides
experts), 2 micro batches of a data-parallel rank or more, ragged labels. A figure is the largest relative error of all
losses, gradient norms and gradients, of every step; of a gradient that is less than a thousandth of the whole, relative
to that thousandth. Above 1e-5 a layout would be wrong. A number in brackets is a layout that is refused before any
process starts, and why is told below.

How the degrees of the expert strategies (ep, etp) fold over the ranks of the others, [plugins.md](plugins.md) tells.

"""


def main(chosen: list[str]) -> None:
    """Run the layouts, and write the page, or print it where strategies are named."""
    names = Registry().names("parallel")
    unknown = [name for name in chosen if name not in names]
    if unknown:
        sys.exit(f"no strategy '{unknown[0]}' is installed; there are {', '.join(names)}")
    began, refused = monotonic(), {}
    page = TEXT + table(chosen or names, refused)
    page += "".join(f"\n{number}. `{layout}`: {reason}" for number, (layout, reason) in enumerate(refused.items(), 1))
    page = f"{page.rstrip()}\n"
    if chosen:
        print(page)
    else:
        PAGE.write_text(page)
        print(f"{PAGE} written in {(monotonic() - began) / 60:.1f} minutes")


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
    """The figure of a layout, or the number of its refusal."""
    try:
        error = error_of(EXPERTS if divides_experts else DENSE, word)
    except SkipTest as reason:
        refused[word] = str(reason).partition("is refused: ")[2]
        return f"({len(refused)})"
    return f"{error:.1e}" if error <= 1e-5 else f"**{error:.1e}**"


if __name__ == "__main__":
    main(sys.argv[1:])
