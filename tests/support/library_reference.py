"""The logits of the transformers library for the weights of a bundled family: the reference of the family's suite."""

import importlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from library_models import wide
from mplug_huggingface_format.model_config import config_of
from torch import Tensor

from mplug.checkpoint.external_form import conversion
from mplug.checkpoint.transfer import fill_theirs
from mplug.layout.mesh import Mesh
from mplug_testing import ModelSuite
from mplug_testing.blueprint import on_meta
from mplug_testing.harness import tiny_run


def library_logits(suite: ModelSuite, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """[B, S] -> [B, S, V] in fp64: the library's model of the run's public config, with the run's weights."""
    transformers = pytest.importorskip("transformers")
    run = tiny_run(suite.tiny())
    public = dict(config_of(run.config))
    kind = public["model_type"]
    module = kind.removesuffix("_text")
    importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    with wide(module):
        config = transformers.AutoConfig.for_model(**public)
        library: Any = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", experts_implementation="eager"
        )
        library = library.double().eval()
        _load(library, _public_weights(run, weights))
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


def _load(library: Any, weights: Mapping[str, Tensor]) -> None:
    """Put the weights into the library's model, which keeps the experts of a block in one tensor."""
    import transformers

    merged = dict(weights)
    own = dict(library.state_dict())
    for name in [name for name in own if name not in merged]:
        prefix = name.rpartition(".")[0]
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            merged[name] = _stacked(merged, prefix, name.rpartition(".")[2], len(own[name]))
        elif name.replace(".mlp.", ".block_sparse_moe.") in merged:
            merged[name] = merged[name.replace(".mlp.", ".block_sparse_moe.")]
        elif name == "lm_head.weight" and library.config.tie_word_embeddings:
            merged[name] = merged["model.embed_tokens.weight"]
    missing = [name for name in own if name not in merged]
    assert not missing, f"transformers {transformers.__version__} has {missing}, which the published form lacks"
    library.load_state_dict({name: merged[name] for name in own}, strict=False)


def _stacked(weights: Mapping[str, Tensor], prefix: str, name: str, count: int) -> Tensor:
    parts = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}[name]
    for place in (prefix, prefix.replace(".mlp.", ".block_sparse_moe.")):
        for words in parts:
            names = [[f"{place}.{n}.{word}.weight" for word in words] for n in range(count)]
            if all(one in weights for row in names for one in row):
                return torch.stack([torch.cat([weights[one] for one in row]) for row in names])
    raise KeyError(f"{prefix}.{name}")
