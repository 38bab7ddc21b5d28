"""Sampling with a cache gives the tokens of full recomputation: every family, unequal prompts, under layouts."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mplug.errors import UsageError
from mplug.model.build import allocate_parts, build_model
from mplug.model.decoding import ALONE, Ranks, multiple_of_positions, refuse_undivided, sample
from mplug.model.memory import initialize
from mplug.model.model import Model
from mplug.model.sampling import Sampling, sample_key
from mplug.nn import Cache, CacheSize
from mplug.run.run import Decoding, Run
from mplug.testing import run_workers
from mplug.testing.harness import tiny_run

SHAPE: dict[str, Any] = {
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 2,
    "model.ffn_hidden_size": 24,
    "model.vocab_size": 259,
    "model.init_std": 0.5,
    "trainer.precision": "fp64",
    "trainer.device": "cpu",
}
WINDOWS: dict[str, Any] = {"model.window": 4, "model.attention_types": ("window", "full"), "model.head_dim": 16}
EXPERTS: dict[str, Any] = {"model.num_experts": 4, "model.num_experts_per_token": 2}
LATENT: dict[str, Any] = {
    **EXPERTS,
    "model.num_kv_heads": None,
    "model.num_dense_layers": 1,
    "model.moe_ffn_hidden_size": 12,
    "model.moe_router_num_groups": 1,
    "model.moe_router_top_groups": 1,
    "model.q_lora_rank": 10,
    "model.kv_lora_rank": 13,
    "model.qk_nope_head_dim": 8,
    "model.qk_rope_head_dim": 4,
    "model.v_head_dim": 6,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {"model.name": "gpt", "model.position": "learned", "model.max_position_embeddings": 64},
    "mixtral": {"model.name": "mixtral", **EXPERTS},
    "llama": {"model.name": "llama"},
    "qwen": {"model.name": "qwen", "model.head_dim": 16},
    "gemma": {"model.name": "gemma", **WINDOWS, "model.attention_soft_cap": 2.0},
    "gpt-oss": {"model.name": "gpt-oss", **WINDOWS, **EXPERTS},
    "deepseek": {"model.name": "deepseek", **LATENT},
}
PROMPTS = [[1], [200, 7, 7], [5] * 9, [*range(40, 54)], [3, 1], [*range(7)], [9, 8, 7, 6, 5, 4, 3], [*range(100, 111)]]
"""Eight prompts of eight lengths, from 1 to 14 tokens (two have 7)."""
TOKENS, CONTEXT = 8, 64


def built(settings: dict[str, Any], padded: bool = True, **changes: Any) -> tuple[Run, Model]:
    run = tiny_run({**SHAPE, **settings, **changes})
    run.decoding = Decoding(padded)
    model = build_model(run)
    allocate_parts(run, model)
    initialize({name: one.data for name, one in model.parameters().items()}, model.placements, run.rank, 3)
    return run, model


def texts(
    model: Model,
    prompts: list[list[int]],
    context: int = CONTEXT,
    sampling: Sampling = Sampling(1.0),
    ranks: Any = ALONE,
    num_tokens: int = TOKENS,
) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in prompts]
    keys = [sample_key(sampling.seed)] * len(prompts)
    sample(model, prompts, keys, num_tokens, context, sampling, lambda n, t: bool(found[n].append(t)), ranks)
    return found


def recomputed(model: Model, prompts: list[list[int]], context: int = CONTEXT) -> list[list[int]]:
    """Each prompt alone, all positions again for every token."""
    before, model.uncached = model.uncached, "the test says so"
    found = texts(model, prompts, context)
    model.uncached = before
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_eight_unequal_prompts_with_a_cache_give_the_tokens_of_full_recomputation(family: str) -> None:
    _, model = built(FAMILIES[family])
    assert model.uncached == ""
    found = texts(model, PROMPTS)
    assert found == recomputed(model, PROMPTS)
    assert len({token for text in found for token in text}) > 10


def of_rank(settings: dict[str, Any], prompts: list[list[int]]) -> list[list[int]]:
    run, model = built(settings)
    ranks = Ranks(run, model)
    refuse_undivided(model, ranks)
    return texts(model, prompts, ranks=ranks)


WIDE = pytest.mark.wide("layouts")
LAYOUTS = [
    ("tp2", "gpt", {}),
    ("tp2", "deepseek", {}),
    pytest.param("ep2", "mixtral", {}),
    pytest.param("tp2ep2", "mixtral", {"parallel.tp.sequence_parallel": False}, marks=WIDE),
    pytest.param("tp2ep2", "gpt-oss", {}, marks=WIDE),
    pytest.param("dp2tp2", "gemma", {}, marks=WIDE),
    pytest.param("zero2", "qwen", {}, marks=WIDE),
    pytest.param("tp4", "llama", {}, marks=WIDE),
    *(pytest.param("tp2", name, {}, marks=WIDE) for name in ("mixtral", "llama", "qwen", "gemma", "gpt-oss")),
    pytest.param("tp2", "deepseek", {"parallel.tp.sequence_parallel": False}, marks=WIDE),
    pytest.param("tp2", "gpt", {"parallel.tp.sequence_parallel": False}, marks=WIDE),
]


@pytest.mark.parametrize(("layout", "family", "changes"), LAYOUTS)
def test_a_layout_gives_the_tokens_of_one_process(layout: str, family: str, changes: dict[str, Any]) -> None:
    settings = {**FAMILIES[family], **changes, "parallel.layout": layout}
    alone = {name: value for name, value in settings.items() if not name.startswith("parallel.")}
    _, model = built(alone)
    expected = recomputed(model, PROMPTS[:3])
    world = 4 if layout not in ("tp2", "ep2", "zero2") else 2
    for found in run_workers(world, of_rank, settings, PROMPTS[:3]):
        assert found == expected
