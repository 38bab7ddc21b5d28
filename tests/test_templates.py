"""What `mplug plugins new` writes, compared with the docs: each page explains the names that its kind's template uses.

`test_scaffold.py` installs and runs what the templates become.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import mplug_testing
from mplug.registry.entry_points import KINDS
from mplug.registry.specification import CONSTANTS, SPECIFICATIONS
from mplug_testing.scaffold import describe, write

DOCS = Path(__file__).parent.parent / "docs"
SHARED = ("plugins-tutorial.md", "plugins.md", "refusing.md", "testing-under-layouts.md")
"""Pages for all kinds."""
OF_KIND = {
    "models": "writing-a-model.md",
    "parallel": "writing-a-strategy.md",
    "kernels": "kernels.md",
    "precisions": "precision.md",
    "tokenizers": "tokenizers.md",
    "memory": "memory.md",
    "adapters": "adapters.md",
    "objectives": "objectives.md",
}
"""The pages of single kinds; plugins.md explains the others."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    for kind in KINDS:
        write(describe(kind, f"{kind}-tried"), folder / kind)
    return folder


def modules(folder: Path) -> list[ast.Module]:
    return [ast.parse(path.read_text(encoding="utf-8")) for path in (folder / "src").rglob("*.py")]


def imported(module: ast.Module) -> set[str]:
    """The names that a module imports from mplug's packages."""
    imports = [node for node in ast.walk(module) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if (node.module or "").partition(".")[0] in ("mplug", "mplug_nn", "mplug_testing")]
    return {alias.name for node in ours for alias in node.names}


def methods(module: ast.Module) -> Iterator[ast.FunctionDef]:
    """The functions of a module that implement hooks."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and "hookimpl" in map(ast.unparse, node.decorator_list):
            yield node


@pytest.mark.parametrize("kind", KINDS)
def test_the_docs_explain_every_name_and_hook_of_a_template(written: Path, kind: str) -> None:
    names = dict.fromkeys((*SHARED, OF_KIND.get(kind, SHARED[0])))
    pages = "".join((DOCS / page).read_text(encoding="utf-8") for page in names)
    used = [name for module in modules(written / kind) for name in imported(module)]
    used += [hook.name for module in modules(written / kind) for hook in methods(module)]
    assert used or kind == "commands"
    assert [name for name in used if not re.search(rf"\b{name}\b", pages)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_has_the_short_forms_of_hooks(written: Path, kind: str) -> None:
    """A constant answer is an attribute, and a method has no argument that it does not use."""
    for hook in (hook for module in modules(written / kind) for hook in methods(module)):
        assert hook.name in SPECIFICATIONS
        given = {argument.arg for argument in hook.args.args[1:]}
        assert given <= {node.id for node in ast.walk(hook) if isinstance(node, ast.Name)}, f"{hook.name} of {kind}"
        assert given or hook.name not in CONSTANTS, f"{hook.name} of {kind}"


@pytest.mark.parametrize("kind", KINDS)
def test_the_attributes_of_a_new_suite_are_those_of_the_suite(written: Path, kind: str) -> None:
    (path,) = (written / kind / "tests").glob("test_*.py")
    (suite,) = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))
    base = getattr(mplug_testing, ast.unparse(suite.bases[0]))
    assert base.kind == kind
    assigned = {ast.unparse(one.targets[0]) for one in suite.body if isinstance(one, ast.Assign)}
    assert assigned - {"plugin", *dir(base)} == set()
    assert "plugin" in assigned
