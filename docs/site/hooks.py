"""What the documentation site shows: the repository's pages at their own paths, and the API of the public packages.

`mkdocs build` calls the functions of this file (`hooks` in mkdocs.yml). A page keeps its path in the repository, so a
relative link works on the site as it does in the repository. README.md is the first page. Its table "Where to read on"
is the navigation: a task of a reader is a section.
"""

import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = ("*.md", "docs/**/*.md", "plugins/*/*/README.md", "*/README.md", "tests/third_party/*/README.md")
"""The pages of the repository."""
LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")
ASSETS = ("docs/site/extra.css", "docs/site/iframe-worker.js")
API = {
    "mplug": "The contracts between the host and plugins.",
    "mplug_ops": "The differentiable collectives of parallel strategies.",
    "mplug.tensors": "Products with weights, and what suppliers of slots share.",
    "mplug.commands": "The names of the host that a plugin of kind `commands` may use.",
    "mplug_nn": "Building blocks for models, in plain torch.",
    "mplug_testing": "The suites with which authors test their plugins.",
}
"""The public packages, each with the first sentence of its page."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation."""
    config.nav = navigation(_api_of(config))
    return config


def _api_of(config: MkDocsConfig) -> list[str]:
    """The packages whose API the site has: none without the plugin that writes it."""
    return [*API] if config.plugins["mkdocstrings"].config.enabled else []


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by those of the site, each at its path in the repository; the theme's files stay."""
    docs = Path(config.docs_dir)
    theme = [file for file in files if file.src_dir is None or not Path(file.src_dir).is_relative_to(docs)]
    own = [
        File(path, str(ROOT), config.site_dir, config.use_directory_urls)
        for path in (*map(str, pages()), *sorted(attached()), *ASSETS)
    ]
    api = [File.generated(config, f"api/{name}.md", content=reference(name)) for name in _api_of(config)]
    return Files([*theme, *own, *api])


def pages() -> list[Path]:
    """The pages of the repository, relative to its root."""
    found = {path.relative_to(ROOT) for pattern in PATTERNS for path in ROOT.glob(pattern)}
    return sorted(path for path in found if not path.parts[0].startswith((".", "build", "dist")))


def attached() -> set[str]:
    """The files that pages link to and that are no pages: pictures and the licence."""
    return {path for page in pages() for path in _links(ROOT / page) if not path.endswith(".md")}


def _links(page: Path) -> Iterator[str]:
    """The targets of a page's relative links, from the root of the repository."""
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if ":" not in target:
            yield str((page.parent / target).resolve().relative_to(ROOT))


def navigation(api: Iterable[str]) -> list[object]:
    """The sections of the site: the tasks of README.md, the plugins, and the packages with the API of some of them."""
    tasks = [{task[:1].upper() + task[1:]: list(paths)} for task, paths in tasks_of_readers().items()]
    kinds: dict[str, list[object]] = {}
    for page in pages():
        if page.parts[0] == "plugins":
            kinds.setdefault(page.parts[1], []).append({page.parts[2]: str(page)})
    named = {path for paths in tasks_of_readers().values() for path in paths}
    libraries = [str(page) for page in pages() if len(page.parts) == 2 and page.name == "README.md"]
    third = [str(page) for page in pages() if page.parts[:2] == ("tests", "third_party")]
    packages = [*(page for page in libraries if page not in named), *({name: f"api/{name}.md"} for name in api)]
    return [
        {"mplug": "README.md"},
        *tasks,
        {"Plugins": [*({kind: found} for kind, found in kinds.items()), {"by third parties": third}]},
        {"Packages": packages},
        {"Changes": "CHANGELOG.md"},
    ]


def tasks_of_readers() -> dict[str, list[str]]:
    """The table "Where to read on" of README.md: a task, and its pages."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.partition("## Where to read on")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|", 1) for line in table.splitlines() if line.startswith("|")][2:]
    return {task.strip(): LINK.findall(cells) for task, cells in rows}


def reference(package: str) -> str:
    """The page of a public package: what it publishes, with signatures and docstrings.

    A package that publishes no names (`mplug.tensors`) publishes its modules.
    """
    module = import_module(package)
    names = getattr(module, "__all__", None) or [found.name for found in iter_modules(module.__path__)]
    public = sorted((name for name in names if not name.startswith("_")), key=str.casefold)
    return "\n\n".join([f"# {package}", API[package], *(f"::: {package}.{name}" for name in public)]) + "\n"
