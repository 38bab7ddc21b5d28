"""The import graph of the code base, and its picture `docs/imports.svg`.

python docs/import_graph.py
"""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "imports.svg"

ORDER = (
    ("cli",),
    ("training",),
    ("model",),
    ("gradients",),
    ("run",),
    ("distributed",),
    ("registry",),
    ("config",),
    ("contracts", "precisions"),
    ("tensors",),
    ("layout",),
    ("errors", "system"),
)
"""The packages and files of `mplug`, top to bottom. An import never runs upwards."""

HOOKS = ("mplug.hookspecs", "mplug.hookspecs.building", "mplug.hookspecs.observing")
OUTSIDE = ("mplug", "mplug.__main__", "mplug.commands", *HOOKS)
"""Modules that may import any package: the public names, the command line, the manual of hooks."""

Graph = Mapping[str, frozenset[str]]


def import_graph(folder: Path) -> Graph:
    """The modules of a package, each with the modules of the same package that it imports.

    Imports inside functions and under TYPE_CHECKING count. `from package import module` imports both: it reads an
    attribute of the package, which its `__init__` may not have yet. `import package.module as module` does not.
    """
    files = {_module_of(path, folder): path for path in folder.rglob("*.py") if "templates" not in path.parts}
    return {
        module: frozenset(_known(name, files) for name in _imports(path, folder.name)) - {module}
        for module, path in files.items()
    }


def _module_of(path: Path, folder: Path) -> str:
    parts = path.relative_to(folder.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path, package: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == package)


def _known(name: str, modules: Mapping[str, object]) -> str:
    """The module that an imported name is, or is in."""
    while name not in modules:
        name = name.rpartition(".")[0]
    return name


def circle(graph: Graph) -> list[str]:
    """Modules that import each other in a circle; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def level(module: str) -> int | None:
    """The row of `ORDER` that holds a module; None for modules outside the order."""
    if module in OUTSIDE:
        return None
    package = module.split(".")[1]
    return next(row for row, packages in enumerate(ORDER) if package in packages)


def upward(graph: Graph) -> list[str]:
    """The imports that run against `ORDER`, as 'importer -> imported'."""
    found = []
    for module, imported in graph.items():
        for other in imported:
            above, below = level(module), level(other)
            if above is not None and (below is None or below < above):
                found.append(f"{module} -> {other}")
    return sorted(found)


# The picture.

WIDTH, HEIGHT, GAP, MARGIN = 420, 34, 26, 20


def between_rows(graph: Graph) -> dict[int, set[int]]:
    """The rows of `ORDER`, each with the rows that it imports."""
    found: dict[int, set[int]] = {row: set() for row in range(len(ORDER))}
    for module, imported in graph.items():
        row = level(module)
        if row is not None:
            found[row] |= {below for other in imported if (below := level(other)) is not None} - {row}
    return found


def without_shortcuts(edges: Mapping[int, set[int]]) -> dict[int, set[int]]:
    """The edges that no longer path replaces."""

    def reached(start: int) -> set[int]:
        return set().union(*({other} | reached(other) for other in edges[start]))

    return {
        row: {other for other in direct if not any(other in reached(via) for via in direct - {other})}
        for row, direct in edges.items()
    }


def label(packages: tuple[str, ...], graph: Graph) -> str:
    """The packages of a row with their numbers of files: 'contracts/ (10 files), precisions/ (2 files)'."""
    counts = {package: sum(module.split(".")[1:2] == [package] for module in graph) for package in packages}
    return ", ".join(
        f"{package}/ ({count} files)" if count > 1 else f"{package}.py" for package, count in counts.items()
    )


def draw(graph: Graph) -> str:
    """The rows of `ORDER` as an SVG: a box a row, an arrow for the imports between two rows.

    An arrow is omitted where a longer path of arrows leads to the same row.
    """
    top = [MARGIN + row * (HEIGHT + GAP) for row in range(len(ORDER))]
    right, centre = MARGIN + WIDTH, MARGIN + WIDTH / 2
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 200}" height="{top[-1] + HEIGHT + MARGIN}" '
        f'font-family="sans-serif" font-size="14">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<marker id="head" markerWidth="9" markerHeight="9" refX="8" refY="4" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#666"/></marker>',
    ]
    for row, direct in without_shortcuts(between_rows(graph)).items():
        for other in sorted(direct):
            start, end = top[row] + HEIGHT / 2, top[other] + HEIGHT / 2
            bend = right + 30 * (other - row)
            curve = f"M{right} {start} C{bend} {start} {bend} {end} {right} {end}"
            straight = f"M{centre} {top[row] + HEIGHT} L{centre} {top[other]}"
            path = straight if other == row + 1 else curve
            lines.append(f'<path d="{path}" fill="none" stroke="#666" marker-end="url(#head)"/>')
    for row, packages in enumerate(ORDER):
        box = f'x="{MARGIN}" y="{top[row]}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="#eef3fb" stroke="#36c"'
        lines.append(f"<rect {box}/>")
        lines.append(f'<text x="{centre}" y="{top[row] + 22}" text-anchor="middle">{label(packages, graph)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(import_graph(ROOT / "mplug")))
