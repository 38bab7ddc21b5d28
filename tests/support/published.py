"""Published checkpoints of tiny random models, made by the transformers library, and models of ours that read them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from mplug_huggingface_format.opened import open_folder
from mplug_huggingface_format.weights import PublicWeights
from safetensors.torch import load_file, save_file
from torch import Tensor

from mplug.checkpoint.pretrained import refuse_another_model
from mplug.checkpoint.public_load import fill_from, weights_of
from mplug.config.defaults import default_settings
from mplug.config.sources import from_mapping, merge
from mplug.layout.placement import Box
from mplug.model.build import allocate_parts, build_model
from mplug.model.model import Model
from mplug.registry.entry_points import Registry
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


def of_kind(kind: str, **fields: Any) -> Callable[..., Any]:
    """How to make a model of a kind ('llama') with these fields."""

    def make(**changes: Any) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**ROWS, **fields, **changes}))

    return make


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 24}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
LATENT = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_key_value_heads": 4}
LATENT |= {"first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
LATENT |= {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
MSCALES = {"mscale": 0.7, "mscale_all_dim": 0.9}
WINDOWS = {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24, "num_hidden_layers": 4}
BASES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
}

FAMILIES: dict[str, Callable[..., Any]] = {
    "gpt2": gpt2,
    "mixtral": mixtral,
    "llama": of_kind("llama", rope_parameters={"rope_type": "llama3", "rope_theta": 5e2, **LLAMA3}, head_dim=16),
    "llama, biases, tied": of_kind("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "qwen2": of_kind("qwen2", tie_word_embeddings=True),
    "qwen3": of_kind("qwen3", head_dim=16),
    "qwen3-moe": of_kind("qwen3_moe", **EXPERTS, decoder_sparse_step=2, head_dim=16),
    "gemma2": of_kind("gemma2", **WINDOWS),
    "gemma3": of_kind("gemma3_text", **WINDOWS, rope_parameters=BASES),
    "gpt-oss": of_kind(
        "gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=6, rope_parameters=YARN
    ),
    "deepseek-v2": of_kind(
        "deepseek_v2", **LATENT, n_shared_experts=2, q_lora_rank=None, topk_method="group_limited_greedy"
    ),
    "deepseek-v3": of_kind(
        "deepseek_v3", **LATENT, n_shared_experts=1, q_lora_rank=10, rope_parameters={**YARN, **MSCALES}
    ),
}
"""By name of the test case, a tiny model of the transformers library."""


def save(model: Any, folder: Path, num_shards: int = 3, dtype: torch.dtype = torch.float32) -> Any:
    """Give a model random weights, of which none is an initial value, and save it in this number of files."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            offset = 1.0 if bool((parameter == 1).all()) else 0.0  # norms, except those whose weights begin as 0
            scale = 1.0 if ".wpe." in name else 0.2
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + offset)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)).roll(3))
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
    fixed = {
        "trainer.device": "cpu",
        "kernels.default": None,
        "trainer.seq_length": 32,
        "checkpoint.pretrained.path": str(folder),
    }
    given = {tuple(name.split(".")): value for name, value in {**fixed, **(settings or {})}.items()}
    overrides: Any = {}
    for key, value in given.items():
        overrides = merge(overrides, from_mapping(value, "the test", key))
    return prepare(resolve(Registry(), default_settings(), overrides))


def loaded(folder: Path, layout: str = "", rank: int = 0, **settings: Any) -> tuple[Run, Model]:
    """The model of one rank of a layout, without other processes, with the weights of a folder."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    run = run_of(folder, {"parallel.layout": layout, "trainer.global_batch_size": 8, **named})
    run.rank = rank
    model = build_model(run)
    allocate_parts(run, model)
    fill_from(open_folder(folder), run, model, weights_of(model))
    model.module.eval()
    return run, model


def logits(model: Model, tokens: Tensor) -> Tensor:
    """The logits [B, S, V] of a model of one process."""
    zeros = torch.zeros(len(tokens), dtype=torch.int64)
    batch = {"tokens": tokens, "positions": torch.arange(tokens.shape[1])[None], "sample_ids": zeros, "keys": zeros}
    with torch.no_grad():
        return model.logits(batch)


def require_fitting(folder: Path) -> None:
    """What the command checks before it starts a run."""
    run = run_of(folder)
    refuse_another_model(folder, build_model(run), run.config.checkpoint.pretrained)


class Made(dict[str, tuple[Path, Any]]):
    """By family, a folder with three files and the model of the transformers library that wrote it."""

    def __init__(self, parent: Path) -> None:
        super().__init__()
        self.parent = parent

    def __missing__(self, family: str) -> tuple[Path, Any]:
        folder = self.parent / family.replace(", ", "-").replace(" ", "-")
        folder.mkdir()
        self[family] = folder, save(FAMILIES[family](), folder)
        return self[family]


def tensors(folder: Path) -> dict[str, tuple[str, Tensor]]:
    """Every tensor of a folder with its file."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: (file.name, tensor) for file in files for name, tensor in load_file(file).items()}


def edited(folder: Path, **fields: Any) -> None:
    """Change fields of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """The folder with one file, after a change of its tensors."""
    found = {name: tensor for name, (_, tensor) in tensors(folder).items()}
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink(missing_ok=True)
    change(found)
    save_file(found, folder / "model.safetensors")


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
