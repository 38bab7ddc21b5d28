"""The house's own rules: who may import whom, what starting up costs, and that the project's lists are true."""

import ast
import builtins
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

import mplug
from mplug.cli import main
from mplug.config.binding import HOST_SECTIONS
from mplug.training.interrupt import STOPPING

ROOT = Path(__file__).parent.parent
HOST = ROOT / "mplug"
LIBRARY_NAMES = (
    *("adapting", "checkpoint", "compile", "estimates", "faults", "graphs", "heal"),
    *("hints", "invariance", "launch", "matrices", "nn", "ops", "pretrained"),
    *("products", "progress", "sampling", "saving", "schedules", "settings", "sharding"),
    *("steps", "streams", "testing", "tokenization", "updates", "validation"),
)
LIBRARIES = [ROOT / name for name in LIBRARY_NAMES]
"""Distributions beside the host. They may import its private modules, and plugins may import all but the first."""
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/*/pyproject.toml"))
STRANGERS = sorted(path.parent for path in ROOT.glob("tests/third_party/*/pyproject.toml"))
PUBLIC = ("mplug", "mplug.commands", "mplug.tensors")


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def package_of(plugin: Path) -> str:
    return project(plugin)["name"].replace("-", "_")


PACKAGES = {package_of(plugin): plugin for plugin in (*PLUGINS, *STRANGERS)}
NAMES = {
    name
    for plugin in PLUGINS
    for group, points in project(plugin)["entry-points"].items()
    if group != "mplug.commands"  # a command's name is typed after 'mplug', and stands in no config
    for name in points
    if not hasattr(builtins, name)  # 'bytes' is Python's word before it is a plugin's
}


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """The nodes of a text's syntax tree; several rules look at each file."""
    return tuple(ast.walk(ast.parse(source)))


def imports(source: str) -> Iterator[str]:
    """Every module that a text imports, however it is spelt."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))


def strings(source: str) -> Iterator[str]:
    """Every string literal of a text that is not a docstring."""
    documented = [n for n in nodes(source) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    docstrings = {id(node.value) for node in documented}
    for node in nodes(source):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


FOREIGN = re.compile(
    r"attention|expert|image|fp8|hugging|config\.json|quant_method|megatron|deepspeed|\bpeft\b|\bhf\b", re.IGNORECASE
)
"""Words of blocks, which only plugins know, and of other software, whose files are read and written by formats."""


@pytest.mark.parametrize("path", sorted(HOST.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_host_knows_no_plugin_no_block_and_no_format_of_other_software(path: Path) -> None:
    source = path.read_text()
    assert not [module for module in imports(source) if module.split(".")[0] in {*PACKAGES, "mplug_nn"}]
    assert not [text for text in strings(source) if text in NAMES or text in PACKAGES]
    assert FOREIGN.findall(source) == []


@pytest.mark.parametrize("plugin", [*PLUGINS, *STRANGERS], ids=package_of)
def test_a_plugin_imports_no_other_plugin_and_of_the_host_only_what_is_exported(plugin: Path) -> None:
    """The tests of strangers, too, take only what is exported."""
    exported = {*mplug.__all__, *(module.partition(".")[2] for module in PUBLIC)}
    own = [*plugin.rglob("src/**/*.py")]
    for path in own:
        for module in imports(path.read_text()):
            top = module.split(".")[0]
            assert top not in PACKAGES or top == package_of(plugin), f"{path} imports {module}"
            public = module.count(".") <= 1 or ".".join(module.split(".")[:2]) in PUBLIC
            assert top != "mplug" or public, f"{path} imports {module}"
    for path in [*own, *(plugin.rglob("tests/*.py") if plugin in STRANGERS else ())]:
        for node in nodes(path.read_text()):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "mplug":
                assert ".".join(node.module.split(".")[:2]) in PUBLIC, f"{path} imports from {node.module}"
                assert node.module != "mplug" or {alias.name for alias in node.names} <= exported, path


@pytest.mark.parametrize("path", sorted((ROOT / "nn").rglob("*.py")), ids=lambda path: path.name)
def test_the_building_blocks_know_nothing_distributed(path: Path) -> None:
    source = path.read_text()
    assert not [module for module in imports(source) if module.startswith("torch.distributed")]
    assert not [node for node in nodes(source) if getattr(node, "attr", "") == "distributed"]
    assert not [text for text in strings(source) if "distributed" in text]


def test_no_spelling_of_an_import_escapes_the_rules() -> None:
    for spelling in (
        "import torch.distributed as d",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "import_module('torch.distributed')",
        "__import__('torch.distributed')",
    ):
        assert "torch.distributed" in set(imports(spelling)), spelling


# What importing a test needs.


def imported_with(source: str, present: set[str]) -> Iterator[str]:
    """Every module that importing a text imports; what a `pytest.importorskip` names is `present` after it."""
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "importorskip":
            present |= {
                str(argument.value).partition(".")[0] for argument in node.args if isinstance(argument, ast.Constant)
            }
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from imports(ast.unparse(node))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending = [*node.orelse, *pending]
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            pending = [*ast.iter_child_nodes(node), *pending]


def files_of(module: str) -> set[Path]:
    """The files of a bundled plugin that importing its module runs."""
    names = module.split(".")
    stems = [PACKAGES[names[0]].joinpath("src", *names[:length]) for length in range(1, len(names) + 1)]
    return {path for stem in stems for path in (stem / "__init__.py", stem.with_suffix(".py")) if path.is_file()}


def unmet(source: str, installed: set[str]) -> set[str]:
    """What importing a text needs beyond what is installed; the modules of bundled plugins that it imports count."""
    pending, seen, found, present = [source], set[Path](), set[str](), set(installed)
    while pending:
        for module in imported_with(pending.pop(0), present):
            package = module.partition(".")[0]
            if package in PACKAGES:
                new = files_of(module) - seen
                seen |= new
                pending += [path.read_text() for path in new]
            elif package not in present:
                found.add(package)
    return found


@pytest.fixture(scope="module")
def installed() -> set[str]:
    """What every machine has that runs tests: Python, the host and the distributions beside it, and what they require.

    Also pytest and hypothesis.
    """
    stated = [requirement for folder in (ROOT, *LIBRARIES) for requirement in project(folder)["dependencies"]]
    required = {re.split("[<>=]", requirement)[0].lower() for requirement in stated}
    modules = packages_distributions().items()
    own = {module for module, names in modules if not required.isdisjoint(name.lower() for name in names)}
    assert {"torch", "yaml"} <= own
    support = {path.stem for path in (ROOT / "tests" / "support").glob("*.py")}
    house = ("mplug", *(f"mplug_{name}" for name in LIBRARY_NAMES))
    return {*sys.stdlib_module_names, *own, *support, *house, "pytest", "hypothesis"}


@pytest.mark.wide("session")
def test_every_test_can_be_collected_with_the_hosts_requirements_only(installed: set[str]) -> None:
    """`pytest -m gpu` imports every test file, on machines that lack what some plugins require."""
    folders = [ROOT, ROOT / "tests", *(plugin / "tests" for plugin in PLUGINS)]
    collected = [path for folder in folders for name in ("conftest.py", "test_*.py") for path in folder.glob(name)]
    files = [*HOST.rglob("*.py"), *collected]
    found = {str(path.relative_to(ROOT)): unmet(path.read_text(), installed) for path in files}
    assert {path: packages for path, packages in found.items() if packages} == {}, "write pytest.importorskip above"


@pytest.mark.parametrize(
    ("source", "packages"),
    [
        ("import numba", {"numba"}),
        ("class Late:\n    from PIL import Image", {"PIL"}),
        ("from mplug_indexed.samples import IndexedLoader", {"numba"}),
        ("def late():\n    import numba", set()),
        ("if TYPE_CHECKING:\n    import numba", set()),
        ("pytest.importorskip('numba')\nimport numba", set()),
        ("import zstandard\npytest.importorskip('numba')", {"zstandard"}),
        ("pytest.importorskip('numba')\nimport numba, zstandard", {"zstandard"}),
        ("pytest.importorskip('megatron.energon')\nimport megatron.energon.errors", set()),
    ],
)
def test_what_importing_a_file_needs_is_found(source: str, packages: set[str], installed: set[str]) -> None:
    assert unmet(source, installed) == packages


# What plugins require.


@pytest.mark.parametrize("folder", [ROOT, *LIBRARIES, *PLUGINS, *STRANGERS], ids=package_of)
def test_a_distribution_requires_the_packages_of_mplug_that_its_modules_import(folder: Path) -> None:
    """Its tests may import more: whoever runs tests installs mplug-testing."""
    files = HOST.rglob("*.py") if folder == ROOT else (folder / "src").rglob("*.py")
    imported = {module.partition(".")[0] for path in files for module in imports(path.read_text())}
    needed = {package for package in imported if package.startswith("mplug") and package != package_of(folder)}
    stated = {re.split("[<>=]", one)[0].replace("-", "_") for one in project(folder)["dependencies"]}
    own = {package for package in stated if package.startswith("mplug")}
    assert own == needed | ({"mplug"} if folder != ROOT else set())


def test_every_requirement_of_a_plugin_has_a_lower_and_an_upper_bound() -> None:
    """The host's bounds of torch hold for all plugins."""
    unbounded = [
        f"{plugin.name}: {requirement}"
        for plugin in PLUGINS
        for words in (project(plugin)["dependencies"], *project(plugin).get("optional-dependencies", {}).values())
        for requirement in words
        if not requirement.startswith("torch>=") and "==" not in requirement and not re.search(">=.*,<", requirement)
    ]
    assert unbounded == []


# Start-up.

HEAVY = ("torch", "numpy", "pydantic")
COMPLETION = {"_MPLUG_COMPLETE": "bash_complete", "COMP_WORDS": "mplug train --model ", "COMP_CWORD": "3"}


def modules_after(arguments: list[str], environment: dict[str, str]) -> set[str]:
    script = (
        "import json, sys\n"
        "from mplug.cli import main\n"
        "try:\n    main(sys.argv[1:], prog_name='mplug')\n"
        "except SystemExit:\n    print('\\n' + json.dumps(sorted(sys.modules)))\n"
    )
    command, changed = [sys.executable, "-c", script, *arguments], {**os.environ, **environment}
    finished = subprocess.run(command, env=changed, capture_output=True, text=True, check=True)
    return set(json.loads(finished.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("words", "needed", "absent"),
    [
        ("--help", "click", {*HEAVY, *PACKAGES}),
        ("train --help", "click", {*HEAVY, *PACKAGES}),
        ("plugins list", "click", {*HEAVY, *PACKAGES}),
        ("", "click", {*HEAVY, *PACKAGES}),
        ("config show", "pydantic", {"torch", "numpy"}),
        ("config schema", "pydantic", {"torch", "numpy"}),
        ("train --set trainer.stpes=1", "pydantic", {"torch", "numpy"}),
    ],
    ids=lambda value: (value or "completion") if isinstance(value, str) else "",
)
def test_help_listing_and_completion_import_no_plugin_and_validation_no_torch(
    words: str, needed: str, absent: set[str]
) -> None:
    loaded = {name.split(".")[0] for name in modules_after(words.split(), {} if words else COMPLETION)}
    assert needed in loaded
    assert not loaded & absent


def test_loading_the_commands_of_all_plugins_imports_nothing_heavy() -> None:
    """As their help does: the first command that imports a heavy module is named."""
    script = (
        "import sys\nfrom importlib import import_module\nfrom mplug.registry.entry_points import Registry\n"
        "for entry in Registry().entries('commands'):\n"
        "    import_module(entry.target.partition(':')[0])\n"
        "    if loaded := set(sys.modules) & set(sys.argv[1:]):\n"
        "        sys.exit(f'{entry.label} imports {sorted(loaded)}')\n"
    )
    finished = subprocess.run([sys.executable, "-c", script, *HEAVY], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


# The project's lists.

ON_REQUEST = ROOT / "requirements-optional.txt"
"""The bundled plugins that the README's commands do not install, because their libraries are large."""


def test_the_requirements_name_the_host_and_every_bundled_plugin() -> None:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    editable = {line.removeprefix("-e ") for line in lines if line.startswith("-e ")}
    on_request = ON_REQUEST.read_text().splitlines()
    requested = {line.removeprefix("-e ") for line in on_request if line.startswith("-e ")}
    assert editable & requested == {"."}, "without the host, pip would take a distribution named mplug from an index"
    assert editable | requested == {".", *(str(folder.relative_to(ROOT)) for folder in (*LIBRARIES, *PLUGINS))}
    assert f"-r {ON_REQUEST.name}" in (ROOT / ".ci" / "run").read_text()
    assert "torch==2.13.0" in lines
    assert "-r requirements.txt" in (ROOT / "requirements-dev.txt").read_text().splitlines()


@pytest.mark.parametrize("plugin", PLUGINS, ids=package_of)
def test_a_bundled_plugin_is_laid_out_like_the_others(plugin: Path) -> None:
    described, host = project(plugin), project(ROOT)
    kind, name = plugin.parent.name, plugin.name
    # a format shares its word with a strategy or a tokenizer of the same library, so its distribution names the kind
    assert described["name"] == (f"mplug-{name}-format" if kind == "formats" else f"mplug-{name}")
    assert described["version"] == host["version"]
    entries = described["entry-points"][f"mplug.{kind}"]
    words = [word for word in entries if word.rpartition(".")[2] == name]  # 'data.NAME' is a command of a group
    assert [entries[word].partition(":")[0] for word in words] == [package_of(plugin)]
    assert (plugin / "src" / package_of(plugin) / "__init__.py").is_file()
    assert len((plugin / "README.md").read_text().splitlines()) > 3
    assert list((plugin / "tests").glob("test_*.py"))


def test_the_host_names_the_package_of_every_command_of_the_default_installation() -> None:
    """For the error of a command whose package is missing."""
    named = yaml.safe_load((HOST / "cli" / "packages.yaml").read_text())
    assert named == {
        point.replace(".", " "): project(folder)["name"]
        for folder in (*LIBRARIES, *PLUGINS)
        for point in project(folder).get("entry-points", {}).get("mplug.commands", {})
    }


def test_the_versions_agree() -> None:
    assert project(ROOT)["version"] == mplug.__version__
    assert f"## {mplug.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_field_of_the_hosts_sections_has_its_default_in_the_data_file_only() -> None:
    def fields(model: type) -> dict:
        nested = {name: field.annotation for name, field in model.model_fields.items()}
        return {name: fields(inner) if hasattr(inner, "model_fields") else None for name, inner in nested.items()}

    def shape(tree: object) -> object:
        return {name: shape(value) for name, value in tree.items()} if isinstance(tree, dict) else None

    default = yaml.safe_load((HOST / "config" / "default.yaml").read_text())
    for section, model in HOST_SECTIONS.items():
        assert shape(default[section]) == fields(model)
        assert all(field.is_required() and field.description for field in model.model_fields.values())


def test_the_generated_pages_are_what_the_code_says(tmp_path: Path) -> None:
    subprocess.run([sys.executable, shutil.copy(ROOT / "docs" / "generate.py", tmp_path)], check=True)
    for page in ("commands.md", "hooks.md", "slots.md"):
        assert (ROOT / "docs" / page).read_text() == (tmp_path / page).read_text(), f"run docs/generate.py for {page}"


def test_h_is_help_for_every_command() -> None:
    for words in ((), ("train",), ("plugins", "list"), ("data", "merge")):
        short, long = (CliRunner().invoke(main, [*words, option]) for option in ("-h", "--help"))
        assert (short.exit_code, short.output) == (0, long.output)
        assert "-h, --help" in short.output


def test_the_pages_show_what_ctrl_c_prints() -> None:
    assert STOPPING.decode() in (ROOT / "docs" / "preprocess.md").read_text()


@pytest.mark.parametrize("command", ["ruff check .", "ruff format --check .", "mypy"])
def test_the_code_is_formatted_linted_and_typed(command: str) -> None:
    finished = subprocess.run([sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
