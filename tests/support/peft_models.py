"""Random tiny models of the transformers library with adapters of PEFT, their folders, and runs that begin with them.

Test files import it after `pytest.importorskip("peft")`.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from library_models import summed_loss, wide
from mplug_huggingface_format.opened import open_folder
from torch import Tensor

from mplug.checkpoint.adapter_files import adapter_conversion, load_adapters
from mplug.checkpoint.public_load import fill_from, weights_of
from mplug.checkpoint.transfer import fill_theirs
from mplug.config.defaults import default_settings
from mplug.config.sources import Settings, from_mapping, merge
from mplug.model.build import allocate_parts, build_model
from mplug.model.model import Model
from mplug.model.pieces import make_pieces
from mplug.registry.entry_points import Registry
from mplug.registry.public import with_public_settings
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug_testing.harness import as_rank

VOCAB = 64
EXACT = 1e-10
COMMON: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None}
ROWS: dict[str, Any] = {
    **COMMON,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
NO_DROPOUT = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**ROWS))


def gpt2() -> Any:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**COMMON, **sizes, **NO_DROPOUT))


def qwen3_moe() -> Any:
    own = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**ROWS, **own, norm_topk_prob=True, router_aux_loss_coef=0.0)
    )


CASES: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "llama": (llama, {"target_modules": "all-linear"}, ["linear"]),
    "llama q v": (
        llama,
        {"target_modules": ["q_proj", "v_proj", "up_proj"], "use_rslora": True},
        ["q_proj", "v_proj", "up_proj"],
    ),
    "llama dora": (
        llama,
        {"target_modules": ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"], "use_dora": True},
        ["q_proj", "k_proj", "out", "gate_proj", "down"],
    ),
    "llama dora dropout": (
        llama,
        {"target_modules": ["q_proj", "v_proj", "down_proj"], "use_dora": True, "lora_dropout": 0.4},
        ["q_proj", "v_proj", "down"],
    ),
    "gpt2": (gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}, ["linear"]),
    "gpt2 dora": (
        gpt2,
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True},
        ["c_attn", "c_proj"],
    ),
    "qwen3-moe": (
        qwen3_moe,
        {"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS},
        ["q_proj", "o_proj", "experts"],
    ),
}
"""The base, the fields of LoraConfig, and adapters.lora.targets."""


class Pair:
    """A model of PEFT with random adapters, its folders, and the settings of a run with both."""

    def __init__(self, name: str, folder: Path, dtype: torch.dtype, rank: int = 3) -> None:
        make, own, targets = CASES[name]
        self.base, self.adapters = folder / "base", folder / "adapters"
        generator = torch.Generator().manual_seed(7)
        model = make()
        randomize(model.named_parameters(), generator, 0.2)
        model.to(dtype).save_pretrained(self.base)
        config = peft.LoraConfig(r=rank, lora_alpha=5, task_type="CAUSAL_LM", **own)
        self.family = model.config.model_type
        with wide(self.family) if dtype is torch.float64 else nullcontext():
            base = transformers.AutoModelForCausalLM.from_pretrained(self.base, **exact(dtype))
        self.model = peft.get_peft_model(base, config).to(dtype)
        randomize(((n, p) for n, p in self.model.named_parameters() if "lora_" in n), generator, 0.1)
        self.model.save_pretrained(self.adapters)
        self.settings: dict[str, Any] = {
            "checkpoint.pretrained.path": str(self.base),
            "adapters.lora.rank": rank,
            "adapters.lora.alpha": 5,
            "adapters.lora.targets": targets,
            "adapters.lora.dora": own.get("use_dora", False),
            "adapters.lora.dropout": own.get("lora_dropout", 0.0),
            "adapters.lora.rank_stabilized": own.get("use_rslora", False),
            "adapters.lora.path": str(self.adapters),
            "trainer.precision": "fp64" if dtype is torch.float64 else "fp32",
        }


def exact(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """How the library loads a model in a number format, with experts in plain torch."""
    return {"dtype": dtype, "attn_implementation": "eager", "experts_implementation": "eager"}


def randomize(parameters: Any, generator: torch.Generator, size: float) -> None:
    with torch.no_grad():
        for name, one in parameters:
            if "magnitude" in name:
                one.mul_(1 + 0.1 * torch.rand(one.shape, generator=generator))
            else:
                offset = 1.0 if "norm" in name or ".ln_" in name else 0.0
                one.copy_(torch.randn(one.shape, generator=generator) * size + offset)


TINY = {"trainer.device": "cpu", "trainer.seq_length": 16, "trainer.global_batch_size": 2, "trainer.compile": "never"}


def run_of(settings: dict[str, Any]) -> Run:
    registry, overrides = Registry(), Settings()
    for name, value in {**TINY, **settings}.items():
        overrides = merge(overrides, from_mapping(value, "the test", tuple(name.split("."))))
    return prepare(resolve(registry, *with_public_settings(registry, default_settings(), overrides)))


def loaded(pair: Pair) -> tuple[Run, Model]:
    return loaded_here(pair.settings, pair.base)


def loaded_here(settings: dict[str, Any], base: Path) -> tuple[Run, Model]:
    """The base model and its adapters; this rank's part of them if there is a process group."""
    run = as_rank(run_of(settings))
    model = build_model(run)
    allocate_parts(run, model)
    fill_from(open_folder(base), run, model, weights_of(model))
    model.listen(model.master_dtype)
    load_adapters(run, model, make_pieces(model))
    return run, model


def published(values: dict[str, Tensor], model: Model) -> dict[str, Tensor]:
    """Tensors of our adapters under the names of PEFT."""
    made = adapter_conversion(model)
    found = {name: torch.zeros(made.shape(name), dtype=torch.float64) for name in made.public}
    for name, tensor in found.items():
        fill_theirs(made.public[name], tensor, lambda own, start, shape: box(values[own], start, shape))
    return found


def box(whole: Tensor, start: Any, shape: Any) -> Tensor:
    return whole[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]


def require_gradients_of_peft(model: Model, theirs: Any, module: str) -> None:
    """Fail unless loss and gradients are those of PEFT in fp64, in which `module` of the library then computes."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, theirs.get_base_model().config.vocab_size, (2, 16), generator=generator)
    labels = torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), dim=1)
    zeros = torch.zeros(2, dtype=torch.int64)
    batch = {
        "tokens": tokens,
        "positions": torch.arange(16)[None],
        "labels": labels,
        "sample_ids": zeros,
        "keys": zeros,
    }
    loss, _ = model.loss(batch)
    loss.backward()
    model.sinks.finish()
    theirs.zero_grad()
    with wide(module):
        expected = summed_loss(theirs(input_ids=tokens, use_cache=False).logits, labels)
    expected.backward()
    assert off(loss.detach(), expected.detach()) < EXACT
    found = published({name: sink.buffer for name, sink in model.sinks.items()}, model)
    gradients = {
        name.replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector"): one.grad
        for name, one in theirs.named_parameters()
        if one.requires_grad
    }
    assert found.keys() == gradients.keys()
    for name, gradient in found.items():
        assert off(gradient, gradients[name]) < EXACT, name


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
