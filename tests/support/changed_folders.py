"""Changes to the tensors of a published folder."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("transformers")

from mplug_huggingface_format.folder import INDEX, WHOLE
from published import VOCAB, require_fitting, rewritten

from mplug.errors import UsageError

Change = Callable[[dict[str, Tensor]], object]
Folder = Callable[[str], Path]
TOKENS = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(3))
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER, O_PROJ = "transformer.h.0", "model.layers.0.self_attn.o_proj.weight"


def changed(path: Path, change: Change = lambda _: None) -> Path:
    rewritten(path, change)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(UsageError) as refused:
        require_fitting(path)
    assert len(str(refused.value).splitlines()) == 1
    return str(refused.value)


def put(name: str, value: Tensor) -> Callable[[Path], object]:
    return lambda path: rewritten(path, lambda found: found.update({name: value}))


def drop(name: str) -> Callable[[Path], object]:
    return lambda path: rewritten(path, lambda found: found.pop(name))


def index(weight_map: object) -> Callable[[Path], object]:
    return lambda path: (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def layer_after_the_last(found: dict[str, Tensor]) -> None:
    last = {name: one for name, one in found.items() if name.startswith("model.layers.3.")}
    found |= {name.replace("layers.3.", "layers.4."): one.clone() for name, one in last.items()}


def of_library(name: str) -> Callable[[Path], object]:
    """Flax keeps matrices as [in, out]; a square one has the same shape."""
    return lambda path: save_file(load_file(changed(path) / WHOLE), path / WHOLE, {"format": name})
