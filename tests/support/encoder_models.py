"""Tiny encoders of the transformers library and of the family bert, with the same weights."""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from beside_library import distances_from, library_config
from library_models import drawn, in_one_process, wide
from mplug_bert import Bert, ModernBert
from torch import Tensor

from mplug import Model
from mplug.registry.bind_section import bind
from mplug.tensors.random import sample_keys
from mplug_nn import form_of

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
MASKED: dict[str, Any] = {
    "data.name": "masked",
    "data.of": {"name": "mock", "vocab_size": V - 2},
    "data.mask_token": V - 1,
    "trainer.seq_length": 12,
}
"""Data of runs of these models."""
TOKENS = torch.randint(3, V, (2, 12), generator=torch.Generator().manual_seed(3))
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
    return in_one_process(family_of(given)(config_of(given)).build_model)


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


def distances(given: Mapping[str, Any], types: Tensor | None = None) -> dict[str, float]:
    """The distances from the library, in fp64, with these types of tokens."""
    batch = micro_batch()
    arguments = (
        {"input_ids": batch["tokens"]} if types is None else {"input_ids": batch["tokens"], "token_type_ids": types}
    )
    batch |= {} if types is None else {"token_types": types}
    importlib.import_module(f"transformers.models.{given['model_type']}.modeling_{given['model_type']}")
    with wide(given["model_type"]):
        return distances_from(library_of(given), arguments, built(given), batch)
