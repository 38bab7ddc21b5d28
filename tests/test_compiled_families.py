"""Every kind of unit of every family compiles as one graph, and gives its gradients to the sinks as eager code does.

Sinks are what trains, so the tests read them: several units add to the sink of a shared parameter.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from layout_words import COMPILING
from library_models import V, batch, built
from tiny_models import LATENT_EXPERTS
from torch._dynamo.backends.common import aot_autograd
from torch._ops import OpOverload
from torch.fx import GraphModule

from mplug.training.batch_parts import with_shifted

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "ffn_hidden_size": 40,
    "vocab_size": V,
}
EXPERTS = {"num_experts": 4, "num_experts_per_token": 2, "moe_ffn_hidden_size": 12}
SCALED = {"activation": "relu2", "rope_fraction": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}}
WINDOW = {"window": 4, "num_kv_heads": 2}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LATENT = {name.partition(".")[2]: value for name, value in LATENT_EXPERTS.items()}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SCALED, "num_mtp_layers": 1},
    "qwen": {**EXPERTS, "num_kv_heads": 2, "feed_forward_types": ("mlp", "experts")},
    "gemma": {**WINDOW, "qk_norm": True, "attention_types": ("window", "full"), "logit_soft_cap": 3.0},
    "gpt-oss": {**EXPERTS, **WINDOW, "head_dim": 8, "rope_scaling": YARN},
    "deepseek": {**LATENT, **SHAPE},
}


OF_FORWARD = {"mplug.count.default", "mplug.keep_max.default"}
"""The operators of these models that change an argument in a forward pass; all others belong to backward."""


def writers(graph: GraphModule) -> set[str]:
    """The operators of mplug in a graph that change an argument."""
    called = [node for node in graph.graph.nodes if node.op == "call_function"]
    operators = [node.args[0] if "auto_functionalized" in str(node.target) else node.target for node in called]
    ours = [one for one in operators if isinstance(one, OpOverload) and one.namespace.startswith("mplug")]
    return {str(one) for one in ours if one._schema.is_mutable}


class Recorded:
    """A compiler that divides a unit's passes as aot_eager and inductor do, and keeps which operators are in each."""

    def __init__(self) -> None:
        self.forward, self.backward = set[str](), set[str]()

    def __call__(self, graph: GraphModule, inputs: Any) -> Any:
        def keeping(found: set[str]) -> Callable[..., Any]:
            def compile_graph(graph: GraphModule, inputs: Any) -> Any:
                found.update(writers(graph))
                return make_boxed_func(graph.forward)

            return compile_graph

        own = {"fw_compiler": keeping(self.forward), "bw_compiler": keeping(self.backward)}
        return aot_autograd(**own, partition_fn=min_cut_rematerialization_partition)(graph, inputs)


def sums_of(model: Any, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What the sinks hold after two micro batches."""
    model.listen(torch.float64)
    model.sinks.begin_step()
    for last in (False, True):
        if last:
            model.sinks.expect_last()
        model.loss(given)[0].backward()
    model.sinks.finish()
    return {name: sink.buffer.clone() for name, sink in model.sinks.items()}


@pytest.mark.wide("compile")
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
@COMPILING
def test_a_compiled_unit_is_one_graph_that_puts_into_sinks_what_eager_code_does(family: str, tied: bool) -> None:
    settings = {**SHAPE, **FAMILIES[family], **({"tie_embeddings": tied} if family != "gpt-oss" else {})}
    torch.compiler.reset()
    plain, compiled, recorded = built(family, settings), built(family, settings), Recorded()
    given = with_shifted(batch(), plain.plan)
    for unit in compiled.plan.units:
        part: Any = compiled.module.get_submodule(unit.name)
        part.forward = torch.compile(part.forward, backend=recorded, fullgraph=True)
    expected = sums_of(plain, given)
    for name, found in sums_of(compiled, given).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-10, atol=1e-12, msg=name)
    assert "mplug.add_product.default" in recorded.backward
    assert recorded.forward <= OF_FORWARD, "an addition of backward has moved into the forward pass"
    torch.compiler.reset()
