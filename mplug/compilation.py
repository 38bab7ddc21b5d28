"""Compiling the units of a model, each as one graph. Torch's compiler, slow to import, comes in where it is used."""

import warnings
from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from mplug.model import Model
from mplug.run import Run


def backend_of(run: Run) -> str | None:
    """The name of torch.compile's backend for the units of a run; None leaves them eager."""
    wanted = run.config.trainer.compile
    if wanted == "auto":
        return "inductor" if run.device.startswith("cuda") else None
    return None if wanted == "never" else wanted


def compile_units(model: Model, backend: str | None) -> None:
    """Compile each unit of this rank as one graph, without a break; blocks of one kind share what is compiled.

    A unit is a call of its module: hooks around it stay outside of the graph.
    """
    if backend is None:
        return
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)  # fp32 is meant where it is asked for
    sparing = _sparing(backend)
    for unit in model.own_units:
        model.module.get_submodule(unit.name).compile(backend=sparing, fullgraph=True, dynamic=False)


def _sparing(name: str) -> Callable[..., Any]:
    """The backend, told to compute cheap inputs of a backward product again: norms' outputs, activations.

    Torch keeps them from the forward pass, because the product needs them in memory; but they are in memory for the
    product only then, and for all blocks otherwise: a third of what blocks keep.
    """
    from torch._dynamo import lookup_backend
    from torch._functorch import config as functorch

    backend = lookup_backend(name)

    def compile_graph(graph: GraphModule, inputs: Any) -> Any:
        with functorch.patch(ban_recompute_materialized_backward=False):
            return backend(graph, inputs)

    return compile_graph


def compiled_graphs() -> int:
    """How many graphs this process has compiled so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
