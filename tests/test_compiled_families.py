"""Every kind of unit of every family compiles as one graph and gives the results of eager code."""

from typing import Any

import pytest
import torch
from library_models import V, batch, built

from mplug.training.batch_parts import with_shifted

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "ffn_hidden_size": 40,
    "vocab_size": V,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_token": 2, "moe_ffn_hidden_size": 12}
LATENT = {"q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"activation": "relu2", "rope_fraction": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "qwen": {**EXPERTS, "num_kv_heads": 2, "feed_forward_types": ("mlp", "experts")},
    "gemma": {"qk_norm": True, "window": 4, "attention_types": ("window", "full"), "logit_soft_cap": 3.0},
    "gpt-oss": {**EXPERTS, "head_dim": 8, "num_kv_heads": 2, "window": 4, "rope_scaling": YARN},
    "deepseek": {
        **EXPERTS,
        **LATENT,
        "num_dense_layers": 1,
        "moe_router_num_groups": 2,
        "moe_router_top_groups": 1,
        "num_mtp_layers": 1,
    },
}


@pytest.mark.wide("compile")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_unit_is_one_graph_with_the_results_of_eager_code(family: str) -> None:
    settings = {**SHAPE, **FAMILIES[family]}
    torch.compiler.reset()
    plain, compiled = built(family, settings), built(family, settings)
    given = with_shifted(batch(), plain.plan)
    for unit in compiled.plan.units:
        part: Any = compiled.module.get_submodule(unit.name)
        part.forward = torch.compile(part.forward, backend="aot_eager", fullgraph=True)
    for model in (plain, compiled):
        model.loss(given)[0].backward()
    expected = {name: parameter.grad for name, parameter in plain.parameters().items()}
    for name, parameter in compiled.parameters().items():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-12, msg=name)
    torch.compiler.reset()
