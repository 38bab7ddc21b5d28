"""The import graph, derived from the code: no circle, no upward import, and its picture is current."""

import ast
import runpy
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT: Mapping[str, Any] = runpy.run_path(str(ROOT / "docs" / "import_graph.py"))
import_graph: Callable[[Path], Mapping[str, frozenset[str]]] = SCRIPT["import_graph"]
circle: Callable[[Mapping[str, frozenset[str]]], list[str]] = SCRIPT["circle"]
upward: Callable[[Mapping[str, frozenset[str]]], list[str]] = SCRIPT["upward"]

HOST = ROOT / "mplug"
PACKAGES = [
    HOST,
    ROOT / "adapting/src/mplug_adapting",
    ROOT / "checkpoint/src/mplug_checkpoint",
    ROOT / "compile/src/mplug_compile",
    ROOT / "estimates/src/mplug_estimates",
    ROOT / "faults/src/mplug_faults",
    ROOT / "graphs/src/mplug_graphs",
    ROOT / "heal/src/mplug_heal",
    ROOT / "hints/src/mplug_hints",
    ROOT / "invariance/src/mplug_invariance",
    ROOT / "launch/src/mplug_launch",
    ROOT / "matrices/src/mplug_matrices",
    ROOT / "nn/src/mplug_nn",
    ROOT / "ops/src/mplug_ops",
    ROOT / "pretrained/src/mplug_pretrained",
    ROOT / "products/src/mplug_products",
    ROOT / "progress/src/mplug_progress",
    ROOT / "sampling/src/mplug_sampling",
    ROOT / "saving/src/mplug_saving",
    ROOT / "schedules/src/mplug_schedules",
    ROOT / "settings/src/mplug_settings",
    ROOT / "sharding/src/mplug_sharding",
    ROOT / "steps/src/mplug_steps",
    ROOT / "streams/src/mplug_streams",
    ROOT / "testing/src/mplug_testing",
    ROOT / "tokenization/src/mplug_tokenization",
    ROOT / "updates/src/mplug_updates",
    ROOT / "validation/src/mplug_validation",
    *sorted(path for path in ROOT.glob("plugins/*/*/src/*") if (path / "__init__.py").is_file()),
]


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda path: path.name)
def test_no_package_imports_in_a_circle(folder: Path) -> None:
    assert circle(import_graph(folder)) == []


def test_every_import_of_the_host_runs_downwards() -> None:
    assert upward(import_graph(HOST)) == []


def test_the_picture_of_the_imports_is_current() -> None:
    assert SCRIPT["PICTURE"].read_text() == SCRIPT["draw"](import_graph(HOST)), "run: python docs/import_graph.py"


@pytest.mark.parametrize(
    ("importing", "found"),
    [
        ("from house.low import b", []),
        ("def late():\n    import house.high", ["house.high", "house.low"]),
        ("if TYPE_CHECKING:\n    from house import high", ["house.high", "house.low"]),
    ],
)
def test_a_circle_is_found_wherever_its_imports_stand(tmp_path: Path, importing: str, found: list[str]) -> None:
    house = tmp_path / "house"
    house.mkdir()
    (house / "__init__.py").touch()
    (house / "high.py").write_text("from house.low import a\n")
    (house / "low.py").write_text(importing if found else "a = 1\n")
    assert sorted(set(circle(import_graph(house)))) == found


def test_an_import_that_runs_upwards_is_found() -> None:
    graph = {"mplug.tensors.sink": frozenset({"mplug.run.run"}), "mplug.run.run": frozenset({"mplug.tensors.sink"})}
    assert upward(graph) == ["mplug.tensors.sink -> mplug.run.run"]


# Names that are imported when they are first used.

LIBRARIES = (
    "mplug_adapting",
    "mplug_compile",
    "mplug_estimates",
    "mplug_faults",
    "mplug_graphs",
    "mplug_heal",
    "mplug_hints",
    "mplug_invariance",
    "mplug_launch",
    "mplug_matrices",
    "mplug_nn",
    "mplug_pretrained",
    "mplug_products",
    "mplug_progress",
    "mplug_sampling",
    "mplug_saving",
    "mplug_schedules",
    "mplug_settings",
    "mplug_sharding",
    "mplug_steps",
    "mplug_streams",
    "mplug_testing",
    "mplug_tokenization",
    "mplug_updates",
    "mplug_validation",
)
PUBLISHED = ("mplug", "mplug.commands", *LIBRARIES)


def declared_in(module: str) -> dict[str, str]:
    """The names that a module imports under TYPE_CHECKING, each as itself, and the modules that define them."""
    tree = ast.parse(Path(str(import_module(module).__file__)).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = [(alias, node.module) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    return {alias.asname: str(defining) for alias, defining in imported if alias.asname == alias.name}


@pytest.mark.parametrize("module", PUBLISHED)
def test_type_checkers_and_dir_see_the_names_that_are_imported_on_first_use(module: str) -> None:
    published, declared = import_module(module), declared_in(module)
    assert sorted(declared) == published.__all__
    submodules = {one.name for one in iter_modules(getattr(published, "__path__", ()))}
    assert submodules.isdisjoint(declared), "importing the submodule would hide the name"
    assert set(dir(published)) >= {*declared, "__name__"}
    for name, defining in declared.items():
        assert getattr(published, name) is getattr(import_module(defining), name)
        assert vars(published)[name] is getattr(published, name), "the second use imports nothing"


@pytest.mark.parametrize("module", PUBLISHED)
def test_a_name_that_is_not_published_is_an_attribute_error(module: str) -> None:
    with pytest.raises(AttributeError, match=f"^module '{module}' has no attribute 'hookimp'$") as raised:
        _ = import_module(module).hookimp
    assert (raised.value.name, raised.value.obj) == ("hookimp", import_module(module))
