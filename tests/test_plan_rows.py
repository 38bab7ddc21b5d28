"""The rows that `benchmarks/plan_rows.py` predicts have the figures of docs/performance.md."""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
ROWS: list[dict[str, Any]] = yaml.safe_load((ROOT / "benchmarks" / "plan_rows.yaml").read_text())["measured"]["rows"]


def sections() -> dict[str, set[str]]:
    """The numbers of each section of the page, without the marks of thousands."""
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
    return {
        name: {number.replace(",", "") for number in re.findall(r"\d[\d,]*(?:\.\d+)?", body)}
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def test_each_measured_figure_stands_in_its_section_of_the_page() -> None:
    page, missing = sections(), []
    for row in ROWS:
        for field in ("ms", "tokens", "gib", "peak"):
            value = row.get(field)
            written = {f"{value:g}", f"{value:.1f}", f"{value:.2f}"} if value else set()
            if value and written.isdisjoint(page[row["section"]]):
                missing.append((row["section"], row["name"], field, value))
    assert missing == []
    assert len(ROWS) > 100


def test_each_row_has_a_name_of_its_own() -> None:
    names = [(row["section"], row["name"]) for row in ROWS]
    assert len(set(names)) == len(names)
