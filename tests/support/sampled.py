"""Tiny models that sample, and the texts that they give. Shared by the tests of a CPU and those of GPUs."""

from typing import Any

from mplug_generate.decoding import ALONE, sample
from mplug_generate.sampler import Sampler, sampling_run
from mplug_generate.sampling import Sampling, sample_key
from mplug_generate.token_steps import Replays

from mplug.model.build import allocate_parts, build_model
from mplug.model.memory import initialize
from mplug.run.run import Run
from mplug_testing.harness import as_rank, tiny_config

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
    "gemma": {"model.name": "gemma", **WINDOWS, "model.attention_soft_cap": 2.0, "model.logit_soft_cap": 3.0},
    "gpt-oss": {"model.name": "gpt-oss", **WINDOWS, **EXPERTS},
    "deepseek": {"model.name": "deepseek", **LATENT},
}
PROMPTS = [[1], [200, 7, 7], [5] * 9, [*range(40, 54)], [3, 1], [*range(7)], [9, 8, 7, 6, 5, 4, 3], [*range(100, 111)]]
"""Eight prompts of eight lengths, from 1 to 14 tokens (two have 7)."""
TOKENS, CONTEXT, PLAIN = 8, 64, Sampling(1.0)


def built(settings: dict[str, Any], *, padded: bool = True, graphs: bool = False) -> tuple[Run, Sampler]:
    """A run that samples, and its sampler, whose model has initial weights."""
    sampler = Sampler(padded=padded, graphs=graphs)
    run = as_rank(sampling_run(tiny_config({**SHAPE, **settings}), sampler))
    model = build_model(run)
    allocate_parts(run, model)
    initialize({name: one.data for name, one in model.parameters().items()}, model.placements, run.rank, 3)
    return run, sampler


def texts(
    sampler: Sampler,
    prompts: list[list[int]],
    context: int = CONTEXT,
    sampling: Sampling = PLAIN,
    ranks: Any = ALONE,
    num_tokens: int = TOKENS,
    replays: Replays | None = None,
) -> list[list[int]]:
    """The tokens that follow each prompt."""
    found: list[list[int]] = [[] for _ in prompts]
    keys = [sample_key(sampling.seed)] * len(prompts)

    def take(number: int, token: int) -> bool:
        found[number].append(token)
        return False

    sample(sampler, prompts, keys, num_tokens, context, sampling, take, ranks, replays)
    return found
