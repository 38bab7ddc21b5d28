"""The suite of a family of decoders: the transformers library is the reference, and presets have the published sizes.

Most fields of experts, windows and multi-token prediction do nothing in a family's usual tiny model. `BESIDE` and
`EXAMPLES` name what else they need; see `mplug_testing.PluginSuite`.
"""

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from library_models import alone, wide
from mplug_huggingface_format.model_config import config_of
from torch import Tensor

from mplug.layout.mesh import Mesh
from mplug_pretrained.external_form import conversion
from mplug_pretrained.transfer import fill_theirs
from mplug_testing import ModelSuite
from mplug_testing.blueprint import on_meta
from mplug_testing.harness import installed_plugins, tiny_run

EXPERTS_AFTER_MLPS = {"num_experts": 4, "num_experts_per_token": 2, "moe_ffn_hidden_size": 24}
EXPERTS = {**EXPERTS_AFTER_MLPS, "feed_forward_types": ["experts"]}
GROUPS = {**EXPERTS, "moe_router_num_groups": 2, "moe_router_top_groups": 1}
WINDOWS = {"window": 4, "attention_types": ["window", "full"]}
OF_EXPERTS = (
    *("moe_ffn_hidden_size", "num_experts_per_token", "num_shared_experts", "moe_router_bias", "feed_forward_types"),
    *("moe_router_score", "moe_router_normalize", "moe_router_scale", "moe_router_jitter", "moe_balance"),
    *("aux_loss_coefficient", "z_loss_coefficient", "expert_bias_rate", "capacity_factor", "expert_projection_bias"),
    "moe_latent_size",
)
OF_SCANS = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_width",
)
BESIDE: dict[str, dict[str, Any]] = {
    **{key: {"mixer_types": ["gated_delta"]} for key in OF_SCANS},
    **dict.fromkeys(OF_EXPERTS, EXPERTS),
    **dict.fromkeys(("moe_router_num_groups", "moe_router_top_groups", "moe_router_group_best"), GROUPS),
    **dict.fromkeys(("window", "attention_types", "window_rope_theta"), WINDOWS),
    "num_dense_layers": EXPERTS_AFTER_MLPS,
    "mlp_bias": {"feed_forward_types": ["mlp"]},
    "expert_bias": {**EXPERTS, "expert_bias_rate": 0.0},
    "capacity_dropping": {**EXPERTS, "capacity_factor": 0.5},
    **{name: {**EXPERTS, "num_shared_experts": 1} for name in ("shared_expert_gate", "moe_shared_ffn_hidden_size")},
    "mtp_loss_coefficient": {"num_mtp_layers": 1},
}
EXAMPLES: dict[str, list[Any]] = {
    "feed_forward_types": [["mlp", "experts"]],
    "rope_scaling": [{"type": "linear", "factor": 4.0}],
    "rope_fraction": [0.5],
}


class DecoderSuite(ModelSuite):
    """The suite of a family. `sizes` are its presets' parameters in billions; tied ones count once."""

    positions = "relative"
    sizes: ClassVar[Mapping[str, float]] = {}
    own_examples: ClassVar[Mapping[str, list[Any]]] = {}
    own_beside: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __init_subclass__(cls) -> None:
        """`examples` and `beside` of the fields that the family's Config has."""
        if hasattr(cls, "plugin"):
            fields = cls.fields()
            cls.examples = {name: one for name, one in {**EXAMPLES, **cls.own_examples}.items() if name in fields}
            cls.beside = {
                name: {f"model.{other}": value for other, value in one.items() if other in fields}
                for name, one in {**BESIDE, **cls.own_beside}.items()
                if name in fields
            }

    def reference(self, weights: Mapping[str, Tensor], batch: Mapping[str, Tensor], config: Any) -> Tensor:
        """The library's logits."""
        return library_logits(self, weights, batch["tokens"])

    def test_its_presets_have_the_published_sizes(self) -> None:
        """To the third digit after the point."""
        if not self.sizes:
            pytest.skip("another suite of the family has them")
        family = installed_plugins().load(self.entry())
        with torch.device("meta"):
            built = {n: alone(family(family.Config(**one["model"]))) for n, one in family.presets.items()}
        numbers = {name: [one.numel() for one in model.parameters().values()] for name, model in built.items()}
        assert {name: sum(one) / 1e9 for name, one in numbers.items()} == pytest.approx(self.sizes, abs=6e-4, rel=0)


class FurtherDecoderSuite(DecoderSuite):
    """Of a family whose fields the suites of llama and deepseek test in the quick set."""

    @pytest.mark.wide("suites")
    def test_every_field_of_its_config_has_an_effect(self) -> None:
        super().test_every_field_of_its_config_has_an_effect()


def library_logits(suite: ModelSuite, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """[B, S] -> [B, S, V] in fp64: the library's model of the run's public config, with the run's weights."""
    transformers = pytest.importorskip("transformers")
    run = tiny_run(suite.tiny())
    public = dict(config_of(run.config))
    module = public["model_type"].removesuffix("_text")
    importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    with wide(module):
        config = transformers.AutoConfig.for_model(**public)
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        kind = type(transformers.AutoModelForCausalLM.from_config(config, **eager))
        held = {"state_dict": _public_weights(run, weights), "output_loading_info": True}
        library, loading = kind.from_pretrained(None, config=config, dtype=torch.float64, **held, **eager)
        assert not loading["missing_keys"], "the published form lacks them"
        with torch.no_grad():
            logits: Tensor = library(input_ids=tokens, use_cache=False).logits
    return logits


def _public_weights(run: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights by the names of the published form."""
    model = on_meta(run)
    model.place(Mesh.of([], 1), None)
    made = conversion(model)

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        return weights[name].detach()[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]

    found = {}
    for name in made.public:
        found[name] = torch.zeros(made.shape(name), dtype=torch.float64)
        fill_theirs(made.public[name], found[name], read)
    return found
