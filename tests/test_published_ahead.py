"""Multi-token prediction of published hybrids: losses and gradients in fp64, beside the transformers library's blocks.

The library drops the tensors `mtp.*` of these folders, so the reference joins the library's own blocks by the published
description: the last block's normalised output and the embedding of the next token, each with a norm, one projection,
the blocks, a norm, and the head of the model (Qwen3-Next and Qwen3.5: a block with attention; Nemotron 3: any parts).
"""

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("transformers")

from config_fields import described, forms, library_config, tiny
from hybrid_models import HYBRIDS
from library_models import Mapped, S, Tensors, built, difference, drawn, summed_loss, wide
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-10
COEFFICIENT = 0.3


class Depth(torch.nn.Module):
    """One depth, with blocks of the library's classes."""

    def __init__(self, config: Any, block: type[torch.nn.Module], norm: type[torch.nn.Module]) -> None:
        super().__init__()
        size, eps = config.hidden_size, getattr(config, "layer_norm_epsilon", None) or config.rms_norm_eps
        self.token_norm, self.hidden_norm, self.norm = norm(size, eps), norm(size, eps), norm(size, eps)
        self.merge = torch.nn.Linear(2 * size, size, bias=False)
        self.layers = torch.nn.ModuleList(block(config, number) for number in range(len(config.layer_types)))


class Ahead(torch.nn.Module):
    """The library's model with depths of multi-token prediction, whose blocks have the types `types`."""

    def __init__(self, kind: str, fields: dict[str, Any], types: list[str], depths: int) -> None:
        super().__init__()
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self.main: Any = AutoModelForCausalLM.from_config(library_config(tiny(kind, **fields)), **eager)
        body = self.main.model
        self.config = copy.deepcopy(self.main.config)
        self.config.layer_types, self.config.mlp_only_layers = types, []
        last: Any = getattr(body, "norm", None) or body.norm_f
        made = (Depth(self.config, type(body.layers[0]), type(last)) for _ in range(depths))
        self.depths = torch.nn.ModuleList(made)

    def losses(self, given: Tensors) -> tuple[Tensor, Tensor]:
        tokens, labels, body = given["tokens"], given["labels"], self.main.model
        hidden = body(tokens, use_cache=False).last_hidden_state
        logits = self.main.lm_head(hidden)
        loss, mask = summed_loss(logits, labels), torch.full((S, S), float("-inf"), dtype=torch.float64).triu(1)
        own = {"position_ids": given["positions"]}
        if hasattr(body, "rotary_emb"):
            own["position_embeddings"] = body.rotary_emb(hidden, given["positions"])
        for number, depth in enumerate(self.depths, start=1):
            ahead = body.get_input_embeddings()(F.pad(tokens[:, number:], (0, number)))
            x = depth.merge(torch.cat((depth.token_norm(ahead), depth.hidden_norm(hidden)), dim=-1))
            for layer, type_ in zip(depth.layers, self.config.layer_types, strict=True):
                x = layer(x, attention_mask=mask[None, None] if type_ == "full_attention" else None, **own)
            hidden = depth.norm(x)
            targets = F.pad(labels[:, number:], (0, number), value=-100)
            loss = loss + COEFFICIENT / len(self.depths) * summed_loss(self.main.lm_head(hidden), targets)
        return logits, loss

    def mapped(self, kind: str, at: str) -> Mapped:
        """Its parameters as ours; `at` is the name of block k in a depth."""
        inside = copy.deepcopy(self.config)
        inside.num_hidden_layers = len(inside.layer_types)

        def ours(theirs: Tensors) -> Tensors:
            main = {name.removeprefix("main."): x for name, x in theirs.items() if name.startswith("main.")}
            outside = {name: x for name, x in main.items() if not name.startswith("model.layers.")}
            found = HYBRIDS[kind](self.main.config, main)
            for number in range(len(self.depths)):
                prefix, own = f"depths.{number}.", f"ahead.depths.{number}"
                depth = {name.removeprefix(prefix): x for name, x in theirs.items() if name.startswith(prefix)}
                found |= {f"{own}.{name}": depth.pop(name) for name in [*depth] if not name.startswith("layers.")}
                blocks = HYBRIDS[kind](inside, outside | {f"model.{name}": x for name, x in depth.items()})
                for k in range(inside.num_hidden_layers):
                    begin = f"blocks.{k}."
                    found |= {
                        f"{own}.{at.format(k)}.{name.removeprefix(begin)}": x
                        for name, x in blocks.items()
                        if name.startswith(begin)
                    }
            return found

        return ours


ATTENTION = ["full_attention"]
PAIR = ["full_attention", "moe"]
EVERY = ["linear_attention", "mlp", "moe", "full_attention"]
CASES: list[tuple[str, dict[str, Any], list[str], int]] = [
    ("qwen3_next", {}, ATTENTION, 1),
    ("qwen3_5_text", {}, ATTENTION, 1),
    ("qwen3_5_moe_text", {}, ATTENTION, 1),
    ("nemotron_h", {"num_nextn_predict_layers": 1}, PAIR, 1),
    ("nemotron_h", {"num_nextn_predict_layers": 2, "mtp_layers_block_type": EVERY}, EVERY, 2),
]


@pytest.mark.parametrize(("kind", "fields", "types", "depths"), CASES)
def test_losses_and_gradients_are_those_of_the_published_description(
    kind: str, fields: dict[str, Any], types: list[str], depths: int
) -> None:
    module = kind.removesuffix("_text")
    importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    settings = described(tiny(kind, **fields)).model_dump()
    settings |= {"num_mtp_layers": depths, "mtp_loss_coefficient": COEFFICIENT, "aux_loss_coefficient": 0.0}
    with wide(module):
        library = Ahead(kind, fields, types, depths)
        reference = drawn(library)
        with torch.no_grad():
            for name, buffer in reference.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.copy_(torch.linspace(-1, 1, len(buffer)).roll(3))
        mapped = library.mapped(kind, "block.branches.{}" if kind == "nemotron_h" else "block")
        model = built(forms()[kind][0], settings)
        assert difference(reference, model, mapped, lambda own, given: own.losses(given)) < TOLERANCE
