"""Random tiny models of the transformers library, and the same models of the bundled families.

The library rounds to fp32 in places. `wide` makes these places fp64, so that both models can be compared in fp64.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import yaml
from torch import Tensor
from torch.nn import functional as F

from mplug import Mesh, Model
from mplug.model.memory import allocate, initialize
from mplug.registry.entry_points import Registry
from mplug.tensors.random import sample_keys
from mplug.training.batch_parts import with_shifted

B, S, V = 2, 12, 61
TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
Tensors = dict[str, Tensor]


class _WideTorch:
    """The module torch, whose fp32 is fp64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def wide(*families: str) -> Iterator[None]:
    """The library's modules of these families compute in fp64 where they would compute in fp32."""
    names = [f"transformers.models.{family}.modeling_{family}" for family in families]
    with mock.patch.object(Tensor, "float", Tensor.double):
        shared = [name for name in ("modeling_rope_utils", "vision_utils") if f"transformers.{name}" in sys.modules]
        modules = [sys.modules[name] for name in (*names, *(f"transformers.{name}" for name in shared))]
        before = [module.torch for module in modules]  # type: ignore[attr-defined]
        try:
            for module in modules:
                module.torch = _WideTorch()  # type: ignore[attr-defined]
            yield
        finally:
            for module, real in zip(modules, before, strict=True):
                module.torch = real  # type: ignore[attr-defined]


def drawn(library: torch.nn.Module, std: float = 0.3) -> torch.nn.Module:
    """The library's model in fp64 with every parameter drawn, near 1 if all of it is 1 (norms) and near 0 otherwise."""
    generator = torch.Generator().manual_seed(7)
    library = library.double().train()
    with torch.no_grad():
        for parameter in library.parameters():
            centre = 1.0 if parameter.dim() == 1 and bool((parameter == 1).all()) else 0.0
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(centre + std * noise)
    return library


def in_one_process(build: Callable[[], Model]) -> Model:
    """The model in fp64 in one process, with its initial values."""
    with torch.device("meta"):
        model = build()
    model.place(Mesh.of([], 1), None)
    model.keep_stage(0)
    allocate(model, 0, torch.device("cpu"), torch.float64, 1)
    initialize(model.parameters(), model.placements, 0, 1)
    return model


def built(name: str, settings: Mapping[str, Any]) -> Model:
    plugin = Registry().load(Registry().find("models", name))
    return in_one_process(lambda: alone(plugin(plugin.Config(**settings))))


def alone(family: Any) -> Model:
    """The model that a family's hook builds, for inference without entries beside the tokens."""
    run = SimpleNamespace(entries=frozenset(), trains=False)
    model: Model = family.build_model(**dict.fromkeys(signature(family.build_model).parameters, run))
    return model


def batch(length: int = S) -> Tensors:
    tokens = torch.randint(V, (B, length + 1), generator=torch.Generator().manual_seed(3))
    labels, ids = tokens[:, 1:].clone(), torch.arange(B)
    labels[0, 2] = -100
    positions, keys = torch.arange(length)[None], sample_keys(1, 1, ids)
    return {"tokens": tokens[:, :-1], "labels": labels, "positions": positions, "sample_ids": ids, "keys": keys}


Mapped = Callable[[Tensors], Tensors]
"""The library's parameters (or their gradients), by name -> ours. Every map is linear."""


Loss = Callable[[torch.nn.Module, Tensors], tuple[Tensor, Tensor]]
"""The library's model and a micro batch -> (logits, sum of the losses)."""


def next_token_loss(library: torch.nn.Module, given: Tensors) -> tuple[Tensor, Tensor]:
    """The cross-entropy of the next tokens."""
    logits = library(input_ids=given["tokens"], use_cache=False).logits
    return logits, summed_loss(logits, given["labels"])


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """logits [B, S, V] and labels [B, S] -> the sum of the losses of tokens with a label."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def difference(library: torch.nn.Module, model: Model, mapped: Mapped, loss: Loss = next_token_loss) -> float:
    """The largest difference of logits and gradients of two models with the same weights.

    A gradient's difference is relative to its largest element.
    """
    own = {**model.parameters(), **model.states()}
    weights = mapped({**dict(library.named_buffers()), **dict(library.named_parameters())})
    assert set(weights) == set(own), set(weights) ^ set(own)
    with torch.no_grad():
        for name, weight in weights.items():
            assert own[name].shape == weight.shape, (name, own[name].shape, weight.shape)
            own[name].copy_(weight)
    given = with_shifted(batch(), model.plan)
    logits, expected_loss = loss(library, given)
    expected_loss.backward()
    model.loss(given)[0].backward()
    found = [relative(model.logits(given), logits)]
    expected = mapped({name: p.grad for name, p in library.named_parameters() if p.grad is not None})
    for name, parameter in model.parameters().items():
        assert parameter.grad is not None, name
        assert expected[name].abs().max() > 1e-9, f"{name} has no gradient in the library's model"
        found.append(relative(parameter.grad, expected[name]))
    return max(found)


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((found.detach() - expected.detach()).abs().max() / expected.detach().abs().max())


# The library's parameters as ours.


def decoder(library: Tensors) -> Tensors:
    """Decoders with the usual names."""
    found = {
        "embedding.token.weight": library["model.embed_tokens.weight"],
        "head.norm.weight": library["model.norm.weight"],
    }
    if "lm_head.weight" in library:
        found["head.project.weight"] = library["lm_head.weight"]
    layer = 0
    while f"model.layers.{layer}.input_layernorm.weight" in library:
        found |= {f"blocks.{layer}.{name}": x for name, x in block(library, f"model.layers.{layer}.").items()}
        layer += 1
    return found


ONE_TO_ONE = {
    **{f"self_attn.{theirs}": f"attn.{ours}" for theirs, ours in (("o_proj", "out"), ("sinks", "sinks"))},
    **{f"self_attn.{which}_norm.weight": f"attn.{which}_norm" for which in "qk"},
    "self_attn.q_a_proj": "attn.q_down",
    **{f"self_attn.{which}_a_layernorm": f"attn.{which}_latent_norm" for which in ("q", "kv")},
    **{f"self_attn.{which}_b_proj": f"attn.{which}_up" for which in ("q", "kv")},
    "self_attn.kv_a_proj_with_mqa": "attn.kv_down",
    "mlp.down_proj": "mlp.down",
    "mlp.gate": "moe.router",
    "mlp.gate.e_score_correction_bias": "moe.router.bias",
    "mlp.experts.gate_up_proj": "moe.experts.up",
    "mlp.experts.down_proj": "moe.experts.down",
    "mlp.shared_experts.down_proj": "moe.shared.down",
}
JOINED = {
    "attn.qkv": [f"self_attn.{which}_proj" for which in "qkv"],
    "mlp.up": ["mlp.gate_proj", "mlp.up_proj"],
    "moe.shared.up": ["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"],
}
"""Our module -> the library's, whose rows follow each other."""
NORMS = {"input": "norm1", "post_attention": "norm2"}
FOUR_NORMS = {
    "input": "norm1",
    "post_attention": "post_norm1",
    "pre_feedforward": "norm2",
    "post_feedforward": "post_norm2",
}


def block(library: Tensors, prefix: str) -> Tensors:
    own = {name.removeprefix(prefix): x for name, x in library.items() if name.startswith(prefix)}
    norms = FOUR_NORMS if "pre_feedforward_layernorm.weight" in own else NORMS
    found = {f"{ours}.weight": own[f"{theirs}_layernorm.weight"] for theirs, ours in norms.items()}
    if "mlp.router.weight" in own:
        found |= _transposed_experts(own)
        own = {name: x for name, x in own.items() if not name.startswith("mlp.")}
    for kind in ("", ".weight", ".bias"):
        found |= {
            f"{ours}{kind}": own[f"{theirs}{kind}"] for theirs, ours in ONE_TO_ONE.items() if theirs + kind in own
        }
        for ours, theirs in JOINED.items():
            if f"{theirs[-1]}{kind}" in own:
                found[f"{ours}{kind}"] = torch.cat([own[f"{name}{kind}"] for name in theirs])
    if "attn.kv_up.weight" in found and "self_attn.q_proj.weight" in own:
        found["attn.q.weight"] = own["self_attn.q_proj.weight"]
    return found


def _transposed_experts(own: Tensors) -> Tensors:
    """gpt-oss: x @ W, with the rows of gate and up interleaved."""
    up, bias = own["mlp.experts.gate_up_proj"].mT, own["mlp.experts.gate_up_proj_bias"]
    return {
        "moe.router.weight": own["mlp.router.weight"],
        "moe.router.logit_bias": own["mlp.router.bias"],
        "moe.experts.up": torch.cat((up[:, ::2], up[:, 1::2]), dim=1),
        "moe.experts.up_bias": torch.cat((bias[:, ::2], bias[:, 1::2]), dim=1),
        "moe.experts.down": own["mlp.experts.down_proj"].mT,
        "moe.down_bias": own["mlp.experts.down_proj_bias"],
    }


def gpt2(library: Tensors) -> Tensors:
    """GPT-2, whose matrices are transposed."""
    names = {"wte": "embedding.token", "wpe": "embedding.position", "ln_f": "head.norm", "lm_head": "head.project"}
    parts = {"ln_1": "norm1", "ln_2": "norm2", "attn.c_attn": "attn.qkv", "attn.c_proj": "attn.out"}
    parts |= {"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}
    found = {}
    for name, x in library.items():
        words = name.removeprefix("transformer.").split(".")
        *module, kind = words
        if module[0] == "h":
            own = f"blocks.{module[1]}.{parts['.'.join(module[2:])]}"
            found[f"{own}.{kind}"] = x.mT if x.dim() == 2 else x
        else:
            found[f"{names['.'.join(module)]}.{kind}"] = x
    return found
