"""docs/layouts.md has a figure or a reason for every installed strategy and pair, and its script measures them."""

import re
import sys
from itertools import combinations
from pathlib import Path

import pytest

from mplug.registry.entry_points import Registry

DOCS = Path(__file__).parent.parent / "docs"
REQUESTED = (DOCS.parent / "requirements-deepspeed.txt").read_text().splitlines()
ON_REQUEST = {line.rpartition("/")[2] for line in REQUESTED if line.startswith("-e plugins/parallel/")}
"""Strategies that the page omits, because it does not depend on what is installed."""
FIGURE = re.compile(r"(\d\.\de-\d\d) / \d\.\de[-+]\d\d")
"""The largest difference in fp64, and in fp32."""


def cells(page: str) -> dict[tuple[str, str], str]:
    """(strategy, column) -> what the table says."""
    header, _, *lines = [line for line in page.splitlines() if line.startswith("|")]
    _, *columns = (cell.strip() for cell in header.strip("|").split("|"))
    found = {}
    for line in lines:
        name, *values = (cell.strip().strip("*") for cell in line.strip("|").split("|"))
        found |= {(name, column): value for column, value in zip(columns, values, strict=True)}
    return found


def test_no_strategy_and_no_pair_is_without_a_figure_within_the_rule_or_a_reason() -> None:
    page = (DOCS / "layouts.md").read_text()
    found, names = cells(page), [name for name in Registry().names("parallel") if name not in ON_REQUEST]
    wanted = {(a, f"{b} 2") for a, b in combinations(names, 2)}
    wanted |= {(name, f"{degree} ranks") for name in names for degree in (2, 4)}
    assert {key for key, value in found.items() if value != "·"} == wanted
    for key in wanted:
        if figures := FIGURE.fullmatch(found[key]):
            assert float(figures[1]) <= 1e-10, key
        else:
            number = found[key].strip("()")
            assert re.search(rf"^{number}\. `[a-z0-9]+`: .{{20,}}", page, re.MULTILINE), key


@pytest.mark.wide("layouts")
def test_the_script_measures_what_is_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.syspath_prepend(DOCS)
    import matrix

    matrix.main(["dp"])
    found = cells(capsys.readouterr().out)
    assert set(found) == {("dp", "2 ranks"), ("dp", "4 ranks")}
    assert all((figures := FIGURE.fullmatch(value)) and float(figures[1]) <= 1e-10 for value in found.values())
    with pytest.raises(SystemExit, match="no strategy 'tq' is installed"):
        matrix.main(["tq"])
    sys.modules.pop("matrix")
