"""Tiny T5 models of the transformers library and of the family t5, with the same weights."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from beside_library import distances_from
from library_models import drawn, in_one_process, wide
from mplug_t5 import T5
from torch import Tensor, nn

from mplug.registry.bind_section import bind
from mplug.tensors.random import sample_keys
from mplug_nn import form_of

V, S = 61, 9
LENGTHS = (7, 12, 1)
"""Tokens of each text of the encoder: shorter and longer ones than the decoder's."""
TINY: dict[str, Any] = {
    "model_type": "t5",
    "vocab_size": V,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "dropout_rate": 0.0,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}

SPANS: dict[str, Any] = {
    "data.name": "spans",
    "data.of": {"name": "mock", "vocab_size": 200},
    "data.sentinels": 8,
    "data.end_token": 1,
    "data.encoder_length": 23,
    "data.noise_density": 0.3,
    "data.mean_span": 2.0,
}
"""Data of runs whose vocabulary has 209 tokens."""


def config_of(given: Mapping[str, Any]) -> Any:
    """Our config of a config.json."""
    found = form_of(T5.public_forms, given).read(given)
    config, problems = bind(T5.Config, {**found.choices, **found.fixed})
    assert not problems, problems
    return config


def library_of(given: Mapping[str, Any]) -> Any:
    """The library's model in fp64 with random weights; untied ones have a projection of their own, as folders do."""
    import transformers

    fields = {name: value for name, value in given.items() if name != "model_type"}
    config = transformers.T5Config(**fields)
    model = transformers.T5ForConditionalGeneration._from_config(config, attn_implementation="eager")
    if given.get("tie_word_embeddings") is False:
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    return drawn(model)


def micro_batch(lengths: Sequence[int] = LENGTHS, length: int = S, vocab: int = V) -> dict[str, Tensor]:
    """Samples with texts of these lengths for the encoder, and labels at some positions of the decoder."""
    generator = torch.Generator().manual_seed(3)
    number, total = len(lengths), sum(lengths)
    tokens, labels = (torch.randint(2, vocab, (number, length), generator=generator) for _ in range(2))
    labels[torch.rand(number, length, generator=generator) < 0.3] = -100
    rows = torch.full((number, max(lengths)), -1)
    start = 0
    for row, one in zip(rows, lengths, strict=True):
        row[:one] = torch.arange(start, start + one)
        start += one
    ids = torch.arange(number)
    return {
        "tokens": tokens,
        "labels": labels,
        "positions": torch.arange(length)[None],
        "sample_ids": ids,
        "keys": sample_keys(1, 1, ids),
        "encoder_tokens": torch.randint(2, vocab, (1, total), generator=generator),
        "encoder_places": torch.arange(total)[None],
        "encoder_lengths": torch.tensor([list(lengths)]),
        "encoder_rows": rows,
    }


def padded(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The encoder's tokens as the library takes them: (tokens [B, T] with padding, which of them exist [B, T])."""
    rows = batch["encoder_rows"]
    present = rows >= 0
    return batch["encoder_tokens"][0][rows.clamp(min=0)].masked_fill(~present, 0), present.long()


def distances(given: Mapping[str, Any]) -> dict[str, float]:
    """The distances from the library, in fp64."""
    batch = micro_batch()
    tokens, present = padded(batch)
    arguments = {"input_ids": tokens, "attention_mask": present, "decoder_input_ids": batch["tokens"]}
    importlib.import_module("transformers.models.t5.modeling_t5")
    model = in_one_process(T5(config_of(given)).build_model)
    with wide("t5"):
        return distances_from(library_of(given), arguments, model, batch)
