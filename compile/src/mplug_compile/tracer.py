"""Corrections of torch's compiler: of its partitioner (`_save_parts`), and before 2.13 of its tracer (dynamo).

Before 2.13, the tracer compiles some autograd functions to wrong gradients.

Three faults concern any `torch.autograd.Function` in a compiled unit. Torch reports none of them:

    torch          the forward method                                the compiled gradient
    2.11           returns a tensor that came out of an operation    zero (pytorch issue 180642)
                   unchanged: `y.contiguous()`, `y.to(y.dtype)`,
                   `y.mul_(2)`
    2.11 and 2.12  receives one tensor, which requires a gradient,   that of one argument (issue 181146)
                   as two arguments
    2.11 and 2.12  calls `ctx.mark_dirty`                            wrong if the result is dropped (issue 184113)

The first is corrected as in torch 2.12 (pull request 180921). The others are refused: torch 2.13 refuses the second,
and compiles the third correctly. Functions import torch's tracer themselves, because it imports slowly.
"""

from functools import cache
from operator import getitem
from typing import Any, NoReturn

import torch


@cache
def prepare_compiler() -> None:
    """Correct torch's compiler in this process, its tracer only in older versions; call this before `torch.compile`.

    Also makes it an error, at the first call of a graph, that an operator returns memory of its arguments. Compiled
    code assumes that operators do not, and torch only warns.
    """
    from torch._functorch import config

    config.error_on_custom_op_aliasing = True
    _save_parts()
    if torch.__version__ < "2.12":
        _separate_aliases()
    if torch.__version__ < "2.13":
        _refuse_equal_arguments()
        _refuse_dirty_arguments()


def _save_parts() -> None:
    """Let the partitioner save a part of a result (`q, k, v = heads.split(...)`) whose operation is not recomputed.

    Tracing may create the part where it is used first. If that is in a recomputed region, the part gets the mark of the
    region, and the partitioner fails: it can neither recompute the operation nor save its result, which is no tensor.
    """
    from torch._functorch import partitioners
    from torch.utils.checkpoint import CheckpointPolicy

    torchs: Any = partitioners
    clean = getattr(torchs, "cleanup_recompute_tags", None)
    if clean is None:  # a later torch without this function: its own error stands, and ends such a run
        return

    def without_parts(joint: Any, *arguments: Any, **named: Any) -> Any:
        for node in joint.graph.nodes:
            is_part = node.target is getitem and torchs.must_recompute(node)
            if is_part and not torchs.must_recompute(node.args[0]):
                for mark in [key for key, value in node.meta.items() if isinstance(value, CheckpointPolicy)]:
                    del node.meta[mark]
        return clean(joint, *arguments, **named)

    torchs.cleanup_recompute_tags = without_parts


def _separate_aliases() -> None:
    """Trace a forward method without the intermediate results that alias its output.

    The tracer makes each intermediate result one more output of the function. If it is the same tensor object as a real
    output, autograd keeps the edge of the later one, and the real output's gradient arrives at the wrong place.
    """
    from torch._dynamo.variables import higher_order_ops

    tracer: Any = higher_order_ops
    traced, name = tracer.speculate_subgraph_with_auto_output_flattening, tracer.AutogradFunctionApplyVariable._HOP_NAME

    def separated(tx: Any, function: Any, args: Any, kwargs: Any, description: str, **options: Any) -> Any:
        if description == name and options.get("allow_side_effects"):  # only forward methods allow them
            options["filter_aliased_intermediates"] = True
        return traced(tx, function, args, kwargs, description, **options)

    tracer.speculate_subgraph_with_auto_output_flattening = separated


def _refuse_equal_arguments() -> None:
    """Refuse an autograd function that receives one tensor twice: the tracer drops one of its two gradients.

    Torch 2.13 refuses tensors without a gradient too, such as offsets. Before, these are compiled correctly.
    """
    from torch._dynamo.variables.higher_order_ops import AutogradFunctionApplyVariable

    function: Any = AutogradFunctionApplyVariable
    call = function.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        nodes = [argument.as_proxy().node for argument in args if argument.is_tensor() and argument.requires_grad]
        if len(set(nodes)) < len(nodes):
            _refuse("receives the same tensor as two arguments", "pass x.view_as(x) as the second argument, or")
        return call(self, tx, args, kwargs)

    function.call_function = call_function


def _refuse_dirty_arguments() -> None:
    """Refuse an autograd function that declares a change of its input; the tracer ignores the declaration."""
    from torch._dynamo.variables.misc import AutogradFunctionContextVariable

    context: Any = AutogradFunctionContextVariable
    attribute = context.var_getattr

    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        if name == "mark_dirty":
            _refuse("calls ctx.mark_dirty", "return a new tensor instead, install torch 2.13 or newer, or")
        return attribute(self, tx, name)

    context.var_getattr = var_getattr


def _refuse(fault: str, remedy: str) -> NoReturn:
    """Raise the tracer's exception for code that it does not support; the tracer adds the line of the unit's code."""
    from torch._dynamo.exc import unimplemented

    unimplemented(
        gb_type=f"an autograd function {fault}",
        context="",
        explanation=f"torch {torch.__version__} would compile it to a wrong gradient.",
        hints=[f"{remedy} set trainer.compile=never"],
    )
