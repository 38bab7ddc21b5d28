"""The pages of the repository: their links lead somewhere, and the glossary names classes that exist."""

import re
from pathlib import Path

import pytest

import mplug
import mplug_nn

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "plugins/*/*/README.md", "*/README.md", "tests/third_party/*/README.md")
    for path in ROOT.glob(pattern)
)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*)$", page.read_text(), re.MULTILINE)
    words = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path) if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_the_glossary_names_classes_that_exist() -> None:
    named = re.findall(r"\(`([A-Z]\w+)`\)", (ROOT / "docs" / "glossary.md").read_text())
    assert len(named) > 15
    assert [name for name in named if name not in {*mplug.__all__, *mplug_nn.__all__}] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180
