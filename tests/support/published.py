"""Published checkpoints of tiny random models, made by the transformers library, and models of ours that read them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mplug.checkpoint.public_folder import open_public
from mplug.checkpoint.public_load import fill_from, weights_of
from mplug.checkpoint.public_weights import PublicWeights
from mplug.config.defaults import default_settings
from mplug.config.sources import from_mapping, merge
from mplug.layout.placement import Box
from mplug.model.build import allocate_parts, build_model
from mplug.model.model import Model
from mplug.registry.entry_points import Registry
from mplug.registry.public import with_public_settings
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug.run.run import Run

VOCAB, LONGEST = 300, 96
COMMON: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None}
ROWS: dict[str, Any] = {
    **COMMON,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": LONGEST,
}


def gpt2(**changes: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": LONGEST}
    off = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**{**COMMON, **sizes, **off, **changes}))


def mixtral(**changes: Any) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**{**ROWS, "num_local_experts": 4, "sliding_window": None, **changes}))


FAMILIES: dict[str, Callable[..., Any]] = {"gpt2": gpt2, "mixtral": mixtral}
"""By name of the test case, a tiny model of the transformers library."""


def save(model: Any, folder: Path, num_shards: int = 3, dtype: torch.dtype = torch.float32) -> Any:
    """Give a model random weights, of which none is an initial value, and save it in this number of files."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            offset = 1.0 if "norm" in name or ".ln_" in name else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + offset)
    model = model.to(dtype).eval()
    total = sum(parameter.nbytes for parameter in model.parameters())
    for divisor in (num_shards, num_shards - 0.5, num_shards - 0.25, num_shards - 0.75):  # shards are filled greedily
        for file in folder.glob("*"):
            file.unlink()
        model.save_pretrained(folder, max_shard_size=int(total / divisor) + 1)
        if len(list(folder.glob("*.safetensors"))) == num_shards:
            return model
    raise AssertionError([file.name for file in folder.glob("*")])


def run_of(folder: Path, settings: Mapping[str, Any] | None = None) -> Run:
    """The prepared run of a folder's model."""
    registry = Registry()
    fixed = {"trainer.device": "cpu", "trainer.seq_length": 32, "checkpoint.pretrained.path": str(folder)}
    given = {tuple(name.split(".")): value for name, value in {**fixed, **(settings or {})}.items()}
    overrides: Any = {}
    for key, value in given.items():
        overrides = merge(overrides, from_mapping(value, "the test", key))
    return prepare(resolve(registry, *with_public_settings(registry, default_settings(), overrides)))


def loaded(folder: Path, layout: str = "", rank: int = 0, **settings: Any) -> tuple[Run, Model]:
    """The model of one rank of a layout, without other processes, with the weights of a folder."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    run = run_of(folder, {"parallel.layout": layout, "trainer.global_batch_size": 8, **named})
    run.rank = rank
    model = build_model(run)
    allocate_parts(run, model)
    fill_from(open_public(folder), run, model, weights_of(model))
    model.module.eval()
    return run, model


def logits(model: Model, tokens: Tensor) -> Tensor:
    """The logits [B, S, V] of a model of one process."""
    zeros = torch.zeros(len(tokens), dtype=torch.int64)
    batch = {"tokens": tokens, "positions": torch.arange(tokens.shape[1])[None], "sample_ids": zeros, "keys": zeros}
    with torch.no_grad():
        return model.logits(batch)


def at(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(slice(s, s + n) for s, n in zip(box.start, box.shape, strict=True))]


class Reads:
    """Counts the bytes that are read from files, by wrapping the only method that reads values."""

    def __init__(self, monkeypatch: Any) -> None:
        self.total, self.largest = 0, 0
        original = PublicWeights._slice

        def counted(weights: PublicWeights, name: str, start: Any, shape: Any) -> Tensor:
            found = original(weights, name, start, shape)
            self.total, self.largest = self.total + found.nbytes, max(self.largest, found.nbytes)
            return found

        monkeypatch.setattr(PublicWeights, "_slice", counted)
