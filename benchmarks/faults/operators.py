"""The operators of mutation: what each one replaces in a function, as texts. `mutants.py` names the results.

An operator is a generator: it receives a node of a function's body and yields (operator's name, replaced node, new
text). A mutant replaces one text of a file; all else, comments included, stays as it is.

    remove-collective   a collective is not called: its operand stands for its result
    replace-group       a collective runs over all ranks, over another group of the function, or over this rank alone
    reduction           sum and maximum are exchanged, a sum becomes a mean or its last term
    backward            a backward passes its upstream gradient, or zeros, or calls the dual with the same forward
    swap-arguments      the two dimensions of an exchange are swapped
    shift-index         an index, a bound of a slice or of a range is off by one, a modulus is dropped, `<` is `<=`
    reverse-order       an order is reversed: on all ranks, or on odd ranks only
    drop-scale          a factor or a divisor is dropped
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Change = tuple[str, ast.AST, str]
"""(operator, the replaced node, the new text)."""

OF_TORCH = {
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce", "gather_object", "scatter_object_list"),
    *("all_to_all_single", "all_to_all", "broadcast", "broadcast_object_list", "barrier"),
    *("isend", "irecv", "send", "recv", "batch_isend_irecv"),
}
"""Collectives and transfers of `torch.distributed`."""
OF_A_GROUP = {"allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", "allgather", "allreduce"}
"""Methods of a process group."""
OF_A_RUN = {"summed": "largest", "largest": "summed", "gathered": None}
"""Collective methods of `Run`, and the method with the other reduction."""
GROUPS = ("group", "ring", "ranks")
"""Names of the parameters that hold a process group."""
DUALS = {
    "gather": "join",
    "join": "gather",
    "scatter": "split",
    "split": "scatter",
    "copy": "reduce",
    "reduce": "copy",
    "reduce_scatter": "own_part",
    "own_part": "reduce_scatter",
    "_Copy": "_Reduce",
    "_Reduce": "_Copy",
    "_Gather": "_Join",
    "_Join": "_Gather",
    "_Scatter": "_Split",
    "_Split": "_Scatter",
}
"""A differentiable collective, and the one with the other backward (or, of two that differ in both, its dual)."""
WORLD = "__import__('torch').distributed.group.WORLD"
RANK = "__import__('torch').distributed.get_rank() % 2"
ODD = "(lambda x: x[::-1] if __import__('torch').distributed.is_initialized() and " + RANK + " else x)(list({}))"
WORK = "__import__('types').SimpleNamespace(wait=lambda *_: {}, is_completed=lambda: True)"


@dataclass
class Names:
    """What the operators know of a tree: `collectives` are mplug's own, by the name under which they are called.

    Each has (the place of its group's parameter, whether its result is waited for).
    """

    collectives: dict[str, tuple[int | None, bool]] = field(default_factory=dict)


@dataclass
class Scope:
    """Where a node stands: its file's text, the names imported or defined in it, and the enclosing function.

    `of_ops` are the visible names that stand for collectives of `mplug_ops`, `groups` the texts of the groups that
    collectives of the function's class get, `gradient` is the upstream gradient's name in a backward, and `exchanges`
    says whether the function calls a collective.
    """

    source: bytes
    starts: list[int]
    names: Names
    visible: set[str]
    of_ops: set[str]
    function: ast.FunctionDef
    groups: list[str]
    gradient: str | None
    exchanges: bool
    parents: dict[ast.AST, ast.AST]

    def span(self, node: ast.AST) -> tuple[int, int]:
        """The bytes of a node."""
        first = self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return first, self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def text(self, node: ast.AST) -> str:
        """The text of a node, in parentheses where it needs some."""
        first, last = self.span(node)
        text = self.source[first:last].decode()
        plain = ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant | ast.List | ast.Tuple | ast.ListComp
        return text if isinstance(node, plain) else f"({text})"


def changes_at(node: ast.AST, scope: Scope) -> Iterator[Change]:
    """The changes of every operator at a node."""
    for operator in _OPERATORS:
        yield from operator(node, scope)


def called(node: ast.AST) -> str:
    """The last part of the name of what a call calls, or ''."""
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def is_collective(node: ast.AST, scope: Scope) -> bool:
    """Whether a node calls a collective or starts a transfer."""
    if not isinstance(node, ast.Call):
        return False
    name, owner = called(node), node.func.value if isinstance(node.func, ast.Attribute) else None
    if isinstance(owner, ast.Name) and owner.id == "dist":
        return name in OF_TORCH
    if owner is None or (isinstance(owner, ast.Name) and owner.id in ("ops", "operators")):
        return name in scope.names.collectives and (owner is not None or name in scope.of_ops)
    last = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
    return name in OF_A_GROUP or (name in OF_A_RUN and last == "run")


def _is_work(node: ast.Call, scope: Scope) -> bool:
    """Whether a collective returns what is waited for."""
    own = scope.names.collectives.get(called(node))
    asynchronous = any(one.arg == "async_op" for one in node.keywords)
    started = called(node) in ("isend", "irecv") or called(node) in OF_A_GROUP
    return asynchronous or started or (own is not None and own[1] and _owner(node) != "dist")


def _owner(node: ast.Call) -> str:
    return getattr(node.func.value, "id", "") if isinstance(node.func, ast.Attribute) else ""


def _remove_collective(node: ast.AST, scope: Scope) -> Iterator[Change]:
    if not isinstance(node, ast.Call) or not is_collective(node, scope):
        return
    parent = scope.parents[node]
    if called(node) == "batch_isend_irecv":
        yield "remove-collective", node, "[]"
    elif isinstance(parent, ast.Expr):
        yield "remove-collective", node, "None"
    elif called(node) == "gathered":
        yield "remove-collective", node, f"([{scope.text(node.args[0])}] * {WORLD}.size())"
    elif node.args:
        first = scope.text(node.args[0])
        yield "remove-collective", node, WORK.format(first) if _is_work(node, scope) else first


def group_argument(node: ast.AST, scope: Scope) -> ast.expr | None:
    """The group that is passed to a collective."""
    if not isinstance(node, ast.Call) or not is_collective(node, scope):
        return None
    for keyword in node.keywords:
        if keyword.arg == "group":
            return keyword.value
    if _owner(node) == "operators":
        return node.args[-1]
    own = scope.names.collectives.get(called(node)) if _owner(node) != "dist" else None
    place = own[0] if own is not None else {"broadcast": 2}.get(called(node))
    if place is None or place >= len(node.args) or any(isinstance(one, ast.Starred) for one in node.args):
        return None
    return node.args[place]


def _replace_group(node: ast.AST, scope: Scope) -> Iterator[Change]:
    argument = group_argument(node, scope)
    if argument is not None and scope.text(argument) != "None":
        text = scope.text(argument)
        if "everyone" not in text:
            yield "replace-group", argument, f"{WORLD}.group_name" if _owner(node) == "operators" else WORLD
        other = scope.groups[(scope.groups.index(text) + 1) % len(scope.groups)] if text in scope.groups else text
        if other.rpartition(".")[2] != text.rpartition(".")[2]:
            yield "replace-group", argument, other
    if isinstance(node, ast.Call) and scope.text(node.func).endswith("run.group"):
        yield "replace-group", node, "None"
        yield "replace-group", node, WORLD


def _reduction(node: ast.AST, scope: Scope) -> Iterator[Change]:
    if isinstance(node, ast.Attribute) and node.attr in ("SUM", "MAX", "MIN"):
        other = {"SUM": "MAX", "MAX": "SUM", "MIN": "MAX"}[node.attr]
        yield "reduction", node, f"{scope.text(node.value)}.{other}"
    if isinstance(node, ast.Attribute) and OF_A_RUN.get(node.attr) and scope.text(node.value).endswith("run"):
        yield "reduction", node, f"{scope.text(node.value)}.{OF_A_RUN[node.attr]}"
    if isinstance(node, ast.Constant) and node.value in ("SUM", "MAX"):
        yield "reduction", node, repr({"SUM": "MAX", "MAX": "SUM"}[str(node.value)])
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        yield "reduction", node, f"{scope.text(node.target)} = {scope.text(node.value)}"
    if not isinstance(node, ast.Call):
        return
    name = called(node)
    is_total = is_collective(node, scope) and name in ("all_reduce", "summing_all", "reduce")
    if is_total and not any("MAX" in scope.text(one) or "MIN" in scope.text(one) for one in node.args):
        text = scope.text(node)
        if _owner(node) == "dist" and name == "all_reduce" and len(node.args) == 1:
            yield "reduction", node, f"{text[:-1]}, op={WORLD.replace('group.WORLD', 'ReduceOp.MAX')})"
        elif _owner(node) != "dist" and name == "all_reduce" and len(node.args) == 2:
            yield "reduction", node, f"{text[:-1]}, 'MAX')"
        if not _is_work(node, scope) and not isinstance(scope.parents[node], ast.Expr):
            yield "reduction", node, f"({text} / {WORLD}.size())"
    if isinstance(node.func, ast.Attribute) and name in ("sum", "add_", "amax"):
        other = {"sum": "mean", "add_": "copy_", "amax": "sum"}[name]
        yield "reduction", node.func, f"{scope.text(node.func.value)}.{other}"
    elif isinstance(node.func, ast.Name) and name == "sum" and len(node.args) == 1:
        yield "reduction", node, f"max({scope.text(node.args[0])}, default=0)"


def _backward(node: ast.AST, scope: Scope) -> Iterator[Change]:
    if isinstance(node, ast.Call) and called(node) in DUALS and called(node) in scope.visible:
        other = DUALS[called(node)]
        if is_collective(node, scope) and _owner(node) == "ops":
            yield "backward", node.func, f"ops.{other}"
        elif is_collective(node, scope) and other in scope.visible and _owner(node) != "dist":
            yield "backward", node.func, other
    if isinstance(node, ast.Call) and called(node) in DUALS and _owner(node) == "ops":
        yield "backward", node.func, f"ops.{DUALS[called(node)]}"
    if isinstance(node, ast.Name) and node.id.startswith("_") and node.id in DUALS and DUALS[node.id] in scope.visible:
        yield "backward", node, DUALS[node.id]
    if scope.gradient is None or not isinstance(node, ast.Return) or node.value is None:
        return
    results = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
    for result in results:
        if isinstance(result, ast.Constant):
            continue
        target = result.value if isinstance(result, ast.Starred) else result
        if scope.text(target) == scope.gradient:
            yield "backward", target, f"({scope.gradient} * 0)"
        elif isinstance(result, ast.Starred):
            yield "backward", target, f"[None if x is None else x * 0 for x in {scope.text(target)}]"
        else:
            yield "backward", target, scope.gradient
            yield "backward", target, f"(lambda x: None if x is None else x * 0)({scope.text(target)})"


def _swap_arguments(node: ast.AST, scope: Scope) -> Iterator[Change]:
    if is_collective(node, scope) and called(node) in ("exchange", "all_to_all"):
        assert isinstance(node, ast.Call)
        texts = [scope.text(one) for one in node.args]
        place = 1 if _owner(node) == "operators" else 2
        if len(texts) > place + 1:
            texts[place : place + 2] = texts[place + 1], texts[place]
            yield "swap-arguments", node, f"{scope.text(node.func)}({', '.join(texts)})"
    if isinstance(node, ast.Call) and called(node) == "movedim" and len(node.args) == 2:
        first, second = map(scope.text, node.args)
        yield "swap-arguments", node, f"{scope.text(node.func)}({second}, {first})"


_UNINDEXED = ("list", "dict", "tuple", "set", "type", "Callable", "deque", "Iterator", "Sequence", "Any")
_BY_NAME = {
    *("name", "key", "kind", "axis", "place", "unit", "option", "field", "suffix", "title", "message"),
    *("use", "reduction", "fqn", "partial", "slices"),
}


def _shift_index(node: ast.AST, scope: Scope) -> Iterator[Change]:
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        yield from _shift_subscript(node, scope)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        if len(node.args) == 1:
            yield "shift-index", node.args[0], f"{scope.text(node.args[0])} - 1"
        elif not (isinstance(node.args[0], ast.Constant) and len(node.args) == 3):
            yield "shift-index", node.args[0], f"{scope.text(node.args[0])} + 1"
            yield "shift-index", node.args[1], f"{scope.text(node.args[1])} - 1"
    by_one = isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant) and node.right.value == 1
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and by_one:
        yield "shift-index", node, scope.text(node.left)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and not isinstance(node.left, ast.Constant):
        yield "shift-index", node, scope.text(node.left)
    if isinstance(node, ast.keyword) and node.arg == "by":
        yield "shift-index", node.value, f"-({scope.text(node.value)})"
        yield "shift-index", node.value, f"2 * ({scope.text(node.value)})"
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and not isinstance(node.comparators[0], ast.Constant):
        shifted = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}.get(type(node.ops[0]))
        limit = scope.text(node.comparators[0])
        if shifted and not isinstance(node.left, ast.Constant) and not limit.isupper():
            yield "shift-index", node, f"({scope.text(node.left)} {shifted} {limit})"


def _shift_subscript(node: ast.Subscript, scope: Scope) -> Iterator[Change]:
    base, index = scope.text(node.value), node.slice
    if base.partition("[")[0].rpartition(".")[2] in _UNINDEXED or base.endswith(("environ", "options")):
        return
    if isinstance(index, ast.Slice):
        if index.step is None and index.lower is not None:
            yield "shift-index", index.lower, f"{scope.text(index.lower)} + 1"
        if index.step is None and index.upper is not None:
            yield "shift-index", index.upper, f"{scope.text(index.upper)} - 1"
    elif isinstance(index, ast.UnaryOp) and isinstance(index.operand, ast.Constant):
        yield "shift-index", index, f"{scope.text(index)} - 1"
    elif isinstance(index, ast.Constant):
        if isinstance(index.value, int) and not isinstance(index.value, bool):
            yield "shift-index", index, str(index.value + 1)
    elif isinstance(index, ast.Name | ast.Attribute | ast.BinOp):
        words = scope.text(index).lower()
        if not any(word in words for word in _BY_NAME) and "str" not in base and "," not in words:
            yield "shift-index", index, f"{scope.text(index)} - 1"


def _reverse_order(node: ast.AST, scope: Scope) -> Iterator[Change]:
    if isinstance(node, ast.For) and any(is_collective(one, scope) for one in ast.walk(node)):
        yield "reverse-order", node.iter, ODD.format(scope.text(node.iter))
    if not isinstance(node, ast.Call):
        return
    name, plain = called(node), isinstance(node.func, ast.Name)
    if plain and name == "reversed":
        yield "reverse-order", node, f"list({scope.text(node.args[0])})"
    elif plain and name == "sorted" and scope.exchanges:
        yield "reverse-order", node, ODD.format(scope.text(node))
    elif plain and name == "zip" and len(node.args) > 1 and not isinstance(node.args[1], ast.Starred):
        yield "reverse-order", node.args[1], f"reversed(list({scope.text(node.args[1])}))"
    elif name in ("cat", "stack", "block_diag") and node.args and not plain:
        yield "reverse-order", node.args[0], f"list({scope.text(node.args[0])})[::-1]"
    elif name in ("popleft", "appendleft") and not plain:
        assert isinstance(node.func, ast.Attribute)
        yield "reverse-order", node.func, f"{scope.text(node.func.value)}.{name.removesuffix('left')}"


def _drop_scale(node: ast.AST, scope: Scope) -> Iterator[Change]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv):
        texts = (scope.text(node.left), scope.text(node.right))
        if not any(text.startswith(("'", '"', "f'", 'f"')) for text in texts):
            yield "drop-scale", node, texts[isinstance(node.left, ast.Constant)]
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv):
        yield "drop-scale", node, "pass"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if called(node) in ("mul_", "div_", "mul", "div"):
            yield "drop-scale", node, scope.text(node.func.value)
        elif called(node) in ("_foreach_mul_", "_foreach_div_"):
            yield "drop-scale", node, "None"


_OPERATORS: tuple[Callable[[ast.AST, Scope], Iterator[Change]], ...] = (
    _remove_collective,
    _replace_group,
    _reduction,
    _backward,
    _swap_arguments,
    _shift_index,
    _reverse_order,
    _drop_scale,
)
