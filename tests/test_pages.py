"""The pages of the repository are true: links, classes, commands, tables of what the code computes."""

import os
import re
import runpy
import shlex
import shutil
import sys
from itertools import combinations
from pathlib import Path
from textwrap import dedent, indent
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import mplug
import mplug_nn
import mplug_streams
from mplug import Axis, Box, Bucket, Init, Mesh, Parameter, Placement, Segment, Sharding, contiguous
from mplug.cli import main
from mplug.layout.ranks import Grouping
from mplug.registry.entry_points import Registry
from mplug.registry.hooks import faults, implemented
from mplug_sharding import GatheredPlacement

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
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
    named = re.findall(r"\(`([A-Z]\w+)`\)", (DOCS / "glossary.md").read_text())
    assert len(named) > 15
    assert [name for name in named if name not in {*mplug.__all__, *mplug_nn.__all__, *mplug_streams.__all__}] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


# docs/plugins-tutorial.md: its commands print what it shows, and its code works.

TUTORIAL = (DOCS / "plugins-tutorial.md").read_text()


def block(first: str) -> str:
    """The indented block of the page whose first line begins with these words."""
    found = re.search(rf"^    {re.escape(first)}.*\n(?:    .*\n|\n(?=    ))*", TUTORIAL, re.MULTILINE)
    assert found, f"the page has no block that begins with '{first}'"
    return dedent(found[0])


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package of the tutorial, after a comparison of the command's output with the page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # as after activate
    command, _, shown = block("$ mplug plugins new").partition("\n")
    written = CliRunner().invoke(main, shlex.split(command)[2:])
    assert written.exit_code == 0, written.output
    assert written.output.rstrip() == shown.rstrip()
    return tmp_path / "acme-ringo"


def test_a_new_plugin_has_commands_that_work_also_where_the_environment_is_not_in_the_path(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(package)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    written = CliRunner().invoke(main, ["plugins", "new", "--kind", "extensions", "acme-ringo"]).output
    for words in ("pip install -e acme-ringo", "mplug plugins test extensions/ringo", "mplug train --set extensions"):
        assert f"  {sys.executable} -m {words}" in written


def test_the_tutorial_shows_the_class_and_the_entry_point_that_the_command_writes(package: Path) -> None:
    assert block("class Ringo:") in (package / "src/acme_ringo/__init__.py").read_text()
    assert block('[project.entry-points."mplug.extensions"]') in (package / "pyproject.toml").read_text()


def test_the_change_of_the_tutorial_writes_a_row_for_a_checkpoint(package: Path, tmp_path: Path) -> None:
    module = package / "src/acme_ringo/__init__.py"
    changed = block("@hookimpl\n    def checkpoint_saved")
    module.write_text(f"{module.read_text()}\n{indent(changed, '    ')}")
    plugin: Any = runpy.run_path(str(module))["Ringo"]
    assert faults(plugin) == []
    assert implemented(plugin) == ["checkpoint_saved", "step_finished"]
    run = SimpleNamespace(rank=0, directory=tmp_path, step=7)
    plugin(plugin.Config()).checkpoint_saved(run=run, path=Path("checkpoints/step_00000007"))
    assert (tmp_path / "losses.csv").read_text() == "7,step_00000007\n"


def test_the_tutorial_shows_the_error_of_a_misspelt_field(package: Path) -> None:
    command, _, shown = block("$ mplug train --set extensions.ringo.evry").partition("\n")
    fields = runpy.run_path(str(package / "src/acme_ringo/__init__.py"))["Ringo"].Config.model_fields
    assert shlex.split(command)[-1] == "extensions.ringo.evry=2"
    assert shown.rstrip().endswith(f"unknown field; did you mean 'every'? (fields: {' and '.join(fields)})")


# docs/architecture.md: the example of placements.

MESH = Mesh.of(
    [
        Axis("pp", 2, activations=("units",), distance=100, views=("dense", "sparse")),
        Axis("dp", 2, entries={"batch": contiguous}, distance=20),
        Axis("tp", 4, splits=("heads", "kv_heads", "vocab"), activations=("sequence",)),
        Axis("ep", 2, splits=("expert",), views=("sparse",)),
    ],
    16,
)
INIT = Init("normal", std=0.02)
HEADS, KV_HEADS = Segment("heads", 8, 64), Segment("kv_heads", 2, 64, "copy")
VOCABULARY = Parameter((Segment("vocab", 10, uneven="pad"), "embed"), INIT, over=("batch", "sequence", "units"))
FIRST: dict[str, Any] = {"stage_axis": "pp", "stages": (0,)}
TIED: dict[str, Any] = {"stage_axis": "pp", "stages": (0, 1)}
QKV = Placement("qkv", Parameter(((HEADS, KV_HEADS, KV_HEADS), "embed"), INIT), (768, 512), MESH, **FIRST)
OUTPUT = Placement("output", Parameter(("embed", HEADS), INIT), (512, 512), MESH, **FIRST)
BUCKET = Bucket(("norm", "output"), (0, 512), (512, 512 * 128), 512 * 129, ("dp",), num_owners=2)
EXAMPLE: dict[str, tuple[Placement, int]] = {
    "QKV, 8 query heads of width 64": (QKV, 0),
    "QKV, keys of 2 KV heads": (QKV, 1),
    "vocabulary of 10, padded, tied on both stages": (Placement("v", VOCABULARY, (10, 512), MESH, **TIED), 0),
    "norm": (Placement("norm", Parameter(("embed",), INIT), (512,), MESH, **FIRST), 0),
    "4 experts": (Placement("experts", Parameter(("expert", "mlp", "embed"), INIT), (4, 6, 8), MESH, **FIRST), 0),
    "attention output, no sharding at rest": (OUTPUT, 0),
    "the same, rows sharded by fsdp along dp": (GatheredPlacement.of(OUTPUT, "dp"), 0),
    "the same, a ZeRO bucket's range along dp": (Sharding((BUCKET,)).placed(OUTPUT), 0),
}


@pytest.mark.parametrize("name", EXAMPLE)
def test_a_row_of_the_example_is_what_the_code_computes(name: str) -> None:
    placement, number = EXAMPLE[name]
    facts = getattr(placement, "whole", placement)
    region, box = facts.regions[number], placement.boxes(5)[number]
    cuts = [
        f"{c.axis}: each {c.each}" + (f", copies {c.copies}" if c.copies > 1 else "") for c in region.cuts if c.axis
    ]
    apart = [f"apart: {axis}" for axis in facts.apart]
    cells = [
        name,
        "; ".join([*cuts, *apart]) or "none",
        spans(region.copies),
        spans(region.partial),
        f"{'experts' if 'experts' in name else 'rows'} {box.start[0]} to {box.start[0] + box.shape[0] - 1}",
        listed(box, "copies"),
        listed(box, "partial"),
    ]
    assert f"| {' | '.join(cells)} |" in (DOCS / "architecture.md").read_text()


def spans(grouping: Grouping) -> str:
    return ", ".join(f"{axis} {one}" for axis, one in zip(grouping.axes, grouping.together, strict=True))


def listed(box: Box, which: str) -> str:
    ranks = [*getattr(box, which)]
    return f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 4 else ", ".join(map(str, ranks))


def test_the_page_has_no_other_rows() -> None:
    page = (DOCS / "architecture.md").read_text()
    table = page.partition("| copies on ranks |")[2].partition("\n\n")[0].splitlines()[2:]
    assert [line.split(" | ")[0].removeprefix("| ") for line in table] == list(EXAMPLE)


# docs/layouts.md: a figure or a reason for every installed strategy and pair.

REQUESTED = (ROOT / "requirements-optional.txt").read_text().splitlines()
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
    omitted = {*ON_REQUEST, "diloco"}  # whose runs are not those of one process
    found, names = cells(page), [name for name in Registry().names("parallel") if name not in omitted]
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
