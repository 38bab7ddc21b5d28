"""Tiny encoders of the transformers library and of the family bert, with the same weights."""

import copy
import importlib
from collections.abc import Mapping
from typing import Any

import torch
from library_models import drawn, wide
from mplug_bert import Bert, ModernBert
from torch import Tensor
from torch.nn import functional as F

from mplug import Mesh, Model
from mplug.model.memory import allocate, initialize
from mplug.registry.bind_section import bind
from mplug.tensors.random import sample_keys
from mplug_nn import form_of
from mplug_pretrained import conversion
from mplug_pretrained.transfer import fill_ours

V, B, S = 61, 2, 12
SHAPE: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
}
OLD = {**SHAPE, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", **OLD},
    "roberta": {"model_type": "roberta", **OLD, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "modernbert": {
        "model_type": "modernbert",
        **SHAPE,
        "num_hidden_layers": 4,
        "local_attention": 6,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "cls_token_id": 1,
        "eos_token_id": 2,
        "sep_token_id": 2,
    },
}
ARCHITECTURES = {"bert": "BertForMaskedLM", "roberta": "RobertaForMaskedLM", "modernbert": "ModernBertForMaskedLM"}


def family_of(given: Mapping[str, Any]) -> Any:
    """The family of a config.json."""
    return ModernBert if given["model_type"] == "modernbert" else Bert


def config_of(given: Mapping[str, Any]) -> Any:
    """Our config of a config.json."""
    family = family_of(given)
    found = form_of(family.public_forms, given).read(given)
    config, problems = bind(family.Config, {**found.choices, **found.fixed})
    assert not problems, problems
    return config


def built(given: Mapping[str, Any]) -> Model:
    """Our model of a config.json in fp64, in one process."""
    with torch.device("meta"):
        model: Model = family_of(given)(config_of(given)).build_model()
    model.place(Mesh.of([], 1), None)
    model.keep_stage(0)
    allocate(model, 0, torch.device("cpu"), torch.float64, 1)
    initialize(model.parameters(), model.placements, 0, 1)
    return model


def library_config(given: Mapping[str, Any]) -> Any:
    """The library's config of a config.json."""
    import transformers

    fields = copy.deepcopy({name: value for name, value in given.items() if name != "model_type"})
    return transformers.AutoConfig.for_model(given["model_type"], **fields)


def library_of(given: Mapping[str, Any]) -> Any:
    """The library's model in fp64 with random weights."""
    kind = given["model_type"]
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    made = getattr(module, ARCHITECTURES[kind])
    return drawn(made._from_config(library_config(given), attn_implementation="eager"))


def micro_batch() -> dict[str, Tensor]:
    """Two samples with labels at some positions, and types of tokens."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, V, (B, S), generator=generator)
    labels = torch.randint(3, V, (B, S), generator=generator)
    labels[torch.rand(B, S, generator=generator) < 0.5] = -100
    ids = torch.arange(B)
    positions, keys = torch.arange(S)[None], sample_keys(1, 1, ids)
    return {"tokens": tokens, "labels": labels, "positions": positions, "sample_ids": ids, "keys": keys}


def ours_of(model: Model, library: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The library's tensors by our names. The map is linear."""
    made = conversion(model)
    found = {}

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        return library[name][tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))]

    for name, links in made.links.items():
        found[name] = torch.zeros(links[0].ours.shape, dtype=torch.float64)
        fill_ours(links, (0,) * found[name].dim(), found[name], read)
    return found


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest element."""
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max())


def distances(given: Mapping[str, Any], types: Tensor | None = None) -> dict[str, float]:
    """The largest difference of logits, and of each gradient relative to its largest element."""
    model, batch = built(given), micro_batch()
    with_types = {} if types is None else {"token_type_ids": types}
    importlib.import_module(f"transformers.models.{given['model_type']}.modeling_{given['model_type']}")
    with wide(given["model_type"]):
        library = library_of(given)
        weights = {name: x.detach() for name, x in library.named_parameters()}
        logits = library(input_ids=batch["tokens"], **with_types).logits
        F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum").backward()
    own = model.parameters()
    with torch.no_grad():
        for name, weight in ours_of(model, weights).items():
            own[name].copy_(weight)
    batch |= {} if types is None else {"token_types": types}
    model.loss(batch)[0].backward()
    found = {"logits": relative(model.logits(batch), logits)}
    gradients = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in library.named_parameters()}
    for name, expected in ours_of(model, gradients).items():
        gradient = own[name].grad
        assert gradient is not None, name
        assert expected.abs().max() > 1e-9, f"{name} has no gradient in the library's model"
        found[name] = relative(gradient, expected)
    return found
