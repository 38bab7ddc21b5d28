"""The documentation site: built from the pages of the repository, without a dead link and without another host."""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from scripts import script

pytest.importorskip("mkdocs", reason="mkdocs is absent; requirements-docs.txt installs it")
pytest.importorskip("material", reason="mkdocs-material is absent; requirements-docs.txt installs it")
pytest.importorskip("mkdocstrings_handlers.python", reason="mkdocstrings is absent; requirements-docs.txt installs it")

ROOT = Path(__file__).parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page(HTMLParser):
    """The links of a page, the files that it loads, and the places to which links lead."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and "href" in given and given.get("rel") not in {"canonical", "next", "prev"}:
            self.loaded.append(given["href"])
        elif "src" in given:
            self.loaded.append(given["src"])


@pytest.fixture(scope="module")
def hooks() -> Any:
    return script("docs/site/hooks.py")


def build(folder: Path, api: bool) -> Path:
    """Build the site in a folder, as `mkdocs build` does; `api`: with the API, which takes most of the time."""
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "MPLUG_SITE_API": str(api).lower()}
    built = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("site"), api=False)


@pytest.fixture(scope="module")
def whole_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("whole"), api=True)


def parse(site: Path) -> dict[Path, Page]:
    return {file: Page(file) for file in sorted(site.rglob("*.html")) if file.name != "404.html"}


def dead_links(parsed: dict[Path, Page]) -> list[str]:
    """The relative links that lead to no file, or to no place in it."""
    dead = []
    for file, page in parsed.items():
        for link in page.links:
            path, _, anchor = unquote(link).partition("#")
            if ":" in path:
                continue
            target = (file.parent / path).resolve() if path else file
            if not target.is_file() or (anchor and target.suffix == ".html" and anchor not in parsed[target].places):
                dead.append(f"{file.name}: {link}")
    return dead


def loaded_elsewhere(parsed: dict[Path, Page]) -> set[str]:
    """What pages load and the site does not have."""
    loaded = {(file, link) for file, page in parsed.items() for link in page.loaded if not link.startswith("data:")}
    return {link for file, link in loaded if ":" in link or not (file.parent / link.partition("?")[0]).is_file()}


def name_of(page: Path) -> str:
    return "index.html" if page.name == "README.md" else f"{page.stem}.html"


@pytest.mark.wide("site")
def test_the_site_has_every_page_and_no_dead_link_and_loads_nothing_from_another_host(hooks: Any, site: Path) -> None:
    pages = hooks.pages()
    assert {Path("README.md"), Path("docs/training.md"), Path("plugins/models/gpt/README.md")} <= {*pages}
    assert [page for page in pages if not (site / page.parent / name_of(page)).is_file()] == []
    parsed = parse(site)
    assert sum(len(page.links) for page in parsed.values()) > 5000
    assert dead_links(parsed) == []
    assert loaded_elsewhere(parsed) == set()


@pytest.mark.wide("site")
def test_lists_and_tables_are_rendered_as_such(site: Path) -> None:
    marker = r"(?:[-*] |\d+\. |\|)"
    for file in site.rglob("*.html"):
        assert re.findall(rf"<p>{marker}.*|<p>[^<]*\n{marker}.*", file.read_text(encoding="utf-8")) == [], file


def test_the_navigation_has_the_tasks_of_the_readme_with_every_page(hooks: Any) -> None:
    tasks = hooks.tasks_of_readers()
    assert {"train", "fine-tune", "write a plugin"} <= {*tasks}
    named = {path for paths in tasks.values() for path in paths}
    assert {str(page) for page in hooks.pages() if page.parts[0] == "docs"} - named == set()


# The whole site.


@pytest.mark.wide("site")
def test_the_api_has_every_public_name_with_its_docstring_and_no_dead_link(hooks: Any, whole_site: Path) -> None:
    parsed = parse(whole_site)
    assert dead_links(parsed) == []
    assert loaded_elsewhere(parsed) == set()
    for package in hooks.API:
        names = re.findall(r"^::: (\S+)$", hooks.reference(package), re.MULTILINE)
        assert len(names) > 5
        places = parsed[whole_site / "api" / f"{package}.html"].places
        assert [name for name in names if name not in places] == []
    text = (whole_site / "api" / "mplug.html").read_text(encoding="utf-8")
    assert "One way in which a strategy divides the work of a run over ranks." in text


def browse(address: str, *options: str) -> str:
    """Open a page in a browser without a window, for some seconds of its time; returns what the browser prints."""
    assert CHROMIUM is not None
    words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1400,1000"]
    shown = subprocess.run(
        [*words, "--virtual-time-budget=8000", *options, address], capture_output=True, text=True, timeout=300
    )
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


SHOWN = {
    "index.html": "A first session",
    "docs/training.html": "Train",
    "docs/pipeline.html": "Choose a schedule",
    "docs/from-megatron.html": "Megatron-LM",
    "plugins/models/gpt/index.html": "gpt",
    "api/mplug.html": "Axis",
}
"""Main pages, each with words that it shows."""


@pytest.mark.wide("site")
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium in the PATH")
@pytest.mark.parametrize("page", SHOWN)
def test_a_browser_shows_the_page(page: str, whole_site: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    address, picture = (whole_site / page).as_uri(), tmp_path / "page.png"
    text = re.sub(r"<(script|style).*?</\1>", "", browse(address, "--dump-dom"), flags=re.DOTALL)
    assert SHOWN[page] in text
    browse(address, f"--screenshot={picture}")
    with image.open(picture) as opened:
        assert opened.size == (1400, 1000)
        colours = opened.convert("RGB").getcolors(1 << 20)
    assert len(colours) > 100
    assert max(count for count, _ in colours) < 0.95 * 1400 * 1000


@pytest.mark.wide("site")
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium in the PATH")
def test_the_search_finds_a_page_without_a_server(whole_site: Path) -> None:
    page = browse(f"{(whole_site / 'index.html').as_uri()}?q=zb-limited", "--dump-dom")
    found = re.findall(r'<a href="([^"]*)" class="md-search-result__link"', page)
    assert any("docs/pipeline.html" in link for link in found), found
