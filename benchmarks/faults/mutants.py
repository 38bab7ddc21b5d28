"""Makes mutants of a tree from its code: the same ones, under the same names, until the mutated function changes.

A name says where a mutant is and what it does: `ops/src/mplug_ops/collectives.py::_Copy.backward::remove-collective::0`
is the first (0) mutant of this operator in this function. Edits elsewhere, in the same file too, leave it as it is.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

from operators import GROUPS, Names, Scope, changes_at, group_argument, is_collective

WHOLE = (
    "ops/src/mplug_ops/bounded_rows.py",
    "ops/src/mplug_ops/collectives.py",
    "ops/src/mplug_ops/exchanges.py",
    "ops/src/mplug_ops/operators.py",
    "ops/src/mplug_ops/rows.py",
    "ops/src/mplug_ops/started_rows.py",
    "ops/src/mplug_ops/transfers.py",
    "mplug/gradients/*.py",
    "steps/src/mplug_steps/loss_scale.py",
    "steps/src/mplug_steps/reduction.py",
    "steps/src/mplug_steps/statistics.py",
    "mplug/distributed/groups.py",
    "saving/src/mplug_saving/boxes.py",
    "saving/src/mplug_saving/rank_exchanges.py",
    "pretrained/src/mplug_pretrained/transfer.py",
    "schedules/src/mplug_schedules/actions.py",
    "sharding/src/mplug_sharding/gathered.py",
    "mplug/layout/gradient_flow.py",
    "mplug/layout/mesh.py",
    "pretrained/src/mplug_pretrained/moves.py",
    "mplug/layout/ownership.py",
    "mplug/layout/placement.py",
    "mplug/layout/ranks.py",
    "plugins/parallel/*/src/*/*.py",
)
"""Files in which every operator mutates every function: what they compute decides what ranks exchange."""
EXCHANGES = ("saving/src/mplug_saving/*.py", "mplug/distributed/*.py", "mplug/run/*.py", "pretrained/src/*/*.py")
"""Further files, of which only functions that call a collective are mutated."""
OUTSIDE = {
    "ops/src/mplug_ops/peer_memory.py": "needs several GPUs that map each other's memory",
    "plugins/parallel/ep/src/mplug_ep/mailbox.py": "needs several GPUs that map each other's memory",
    "plugins/parallel/ep/src/mplug_ep/pushed_kernel.py": "needs Triton",
    "plugins/parallel/tp/src/mplug_tp/messages.py": "needs GPUs: on a CPU no pipeline overlaps",
    "plugins/parallel/tp/src/mplug_tp/peers.py": "needs several GPUs that map each other's memory",
    "ops/src/mplug_ops/peer_signals.py": "needs several GPUs that map each other's memory",
    "plugins/parallel/*/src/*/config.py": "settings",
    "plugins/parallel/*/src/*/fit.py": "refusals and estimates",
    "plugins/parallel/fsdp/src/mplug_fsdp/memory.py": "estimates of memory",
    "plugins/parallel/deepspeed/src/mplug_deepspeed/settings.py": "settings of DeepSpeed",
    "plugins/parallel/deepspeed/src/mplug_deepspeed/validation.py": "settings of DeepSpeed",
    "plugins/parallel/deepspeed/src/mplug_deepspeed/toolchain.py": "finds a compiler",
    "plugins/parallel/deepspeed/src/mplug_deepspeed/files.py": "reads files of DeepSpeed: no rank exchanges",
    "plugins/parallel/deepspeed/src/mplug_deepspeed/rules.py": "reads files of DeepSpeed: no rank exchanges",
    "plugins/parallel/pp/src/mplug_pp/busy.py": "measures idle time",
    "sharding/src/mplug_sharding/owned_memory.py": "estimates of memory",
}
"""Files that are left out, and why. No line of them changes a result of training on a CPU."""


@dataclass(frozen=True)
class Mutant:
    """`new` in place of the bytes `start` to `stop` of `file`, which say `old`. `lines` are those of its statement."""

    name: str
    file: str
    start: int
    stop: int
    old: str
    new: str
    lines: tuple[int, ...]

    @property
    def change(self) -> str:
        """What it replaces by what."""
        return f"{self.old} -> {self.new}"

    @property
    def operator(self) -> str:
        """The name of its operator."""
        return self.name.split("::")[2]

    def applied(self, source: bytes) -> bytes:
        """The mutated source."""
        assert source[self.start : self.stop].decode() == self.old, self.name
        return source[: self.start] + self.new.encode() + source[self.stop :]


@cache
def mutants_of(tree: Path) -> tuple[Mutant, ...]:
    """All mutants of a tree, by file and place."""
    outside = {path for pattern in OUTSIDE for path in tree.glob(pattern)}
    whole = {path for pattern in WHOLE for path in tree.glob(pattern)} - outside
    exchanges = {path for pattern in EXCHANGES for path in tree.glob(pattern)} - outside - whole
    names = _names(tree)
    return tuple(
        mutant
        for path in sorted(whole | exchanges)
        for mutant in _mutants_in(path.read_bytes(), str(path.relative_to(tree)), names, path in whole)
    )


def _names(tree: Path) -> Names:
    """The collectives of mplug: public functions of `mplug_ops`, and plain ones that these call."""
    found = Names()
    for path in sorted(tree.glob("ops/src/mplug_ops/*.py")):
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.FunctionDef) and _communicates(node):
                parameters = [one.arg for one in node.args.args]
                place = next((place for place, one in enumerate(parameters) if one in GROUPS), None)
                found.collectives.setdefault(node.name, (place, _words(node.returns) in ("Transfer", "Any")))
    for name in ("_all_gather_single", "_reduce_scatter_single"):
        found.collectives[name] = (None, False)
    return found


def _communicates(function: ast.FunctionDef) -> bool:
    if function.name.startswith("_") or function.name == "own_part":
        return False
    return any(one.arg in GROUPS for one in function.args.args)


def _words(annotation: ast.expr | None) -> str:
    return ast.unparse(annotation) if annotation is not None else ""


def _mutants_in(source: bytes, file: str, names: Names, whole: bool) -> Iterator[Mutant]:
    tree, starts = ast.parse(source), [0, *accumulate(len(line) for line in source.splitlines(keepends=True))]
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    own, imported = _defined(tree), _imported(tree)
    of_ops = {name for name, module in imported.items() if module.startswith("mplug_ops")}
    of_ops |= own if file.startswith("ops/src/mplug_ops/") else set()
    visible = own | imported.keys()
    numbers, seen = Counter[tuple[str, str]](), set[tuple[int, int, str]]()
    for qualified, function, owner in _functions(tree, "", None):
        scope = Scope(source, starts, names, visible, of_ops, function, [], _gradient(function, owner), False, parents)
        nodes = list(_own_nodes(function))
        scope.exchanges = any(is_collective(node, scope) for node in nodes)
        if not (whole or scope.exchanges):
            continue
        scope.groups = _groups(owner or function, scope)
        for node in nodes:
            for operator, target, new in changes_at(node, scope):
                start, stop = scope.span(target)
                old = source[start:stop].decode()
                if new == old or (start, stop, new) in seen or not _is_python(new):
                    continue
                seen.add((start, stop, new))
                number = numbers[qualified, operator]
                numbers[qualified, operator] += 1
                lines = _lines(node, parents)
                yield Mutant(f"{file}::{qualified}::{operator}::{number}", file, start, stop, old, new, lines)


def _defined(tree: ast.Module) -> set[str]:
    """The names of a module's functions, classes and variables."""
    named = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    targets = [one for node in tree.body if isinstance(node, ast.Assign) for one in node.targets]
    return named | {one.id for one in targets if isinstance(one, ast.Name)}


def _imported(tree: ast.Module) -> dict[str, str]:
    """The names that a file imports, with the modules that they come from."""
    found = dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            found.update({alias.asname or alias.name: module for alias in node.names})
    return found


def functions_in(source: bytes) -> dict[str, range]:
    """The names of functions, as names of mutants have them, and the lines of their bodies."""
    return {
        name: range(function.body[0].lineno, (function.end_lineno or function.lineno) + 1)
        for name, function, _ in _functions(ast.parse(source), "", None)
    }


def _functions(
    node: ast.AST, prefix: str, owner: ast.ClassDef | None
) -> Iterator[tuple[str, ast.FunctionDef, ast.ClassDef | None]]:
    """(qualified name, function, its class) of every function whose value is more than a text or a shape."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.", child)
        elif isinstance(child, ast.FunctionDef):
            shapes_only = any("fake" in _words(one) for one in child.decorator_list)
            if not shapes_only and _words(child.returns) != "str":
                yield f"{prefix}{child.name}", child, owner
                yield from _functions(child, f"{prefix}{child.name}.", None)
        else:
            yield from _functions(child, prefix, owner)


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function's body in the order of the text, without nested functions, errors and annotations."""
    waiting: list[ast.AST] = list(reversed(function.body))
    while waiting:
        node = waiting.pop()
        left_out = ast.FunctionDef | ast.ClassDef | ast.Raise | ast.Assert | ast.JoinedStr
        if isinstance(node, left_out):
            continue
        yield node
        children = [
            child
            for name, value in ast.iter_fields(node)
            if name not in ("annotation", "ctx")
            for child in (value if isinstance(value, list) else [value])
            if isinstance(child, ast.AST)
        ]
        waiting += reversed(children)


def _gradient(function: ast.FunctionDef, owner: ast.ClassDef | None) -> str | None:
    """The name of the upstream gradient, if a function is a backward."""
    of_class = owner is not None and any("Function" in ast.unparse(base) for base in owner.bases)
    parameters = [one.arg for one in function.args.args]
    if (function.name == "backward" and of_class) or function.name == "differentiate":
        return parameters[1] if len(parameters) > 1 else None
    return None


def _groups(node: ast.AST, scope: Scope) -> list[str]:
    found = [group_argument(one, scope) for one in ast.walk(node)]
    return list(dict.fromkeys(scope.text(one) for one in found if one is not None and scope.text(one) != "None"))


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _lines(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> tuple[int, ...]:
    """The lines of the statement that a node belongs to; of a compound one, its header's."""
    while not isinstance(node, ast.stmt | ast.ExceptHandler):
        node = parents[node]
    body = getattr(node, "body", None)
    last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
    return tuple(range(node.lineno, last + 1))
