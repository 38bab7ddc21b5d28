"""Tiny models that sample, and the texts that they give. Shared by the tests of a CPU and those of GPUs."""

from typing import Any

from tiny_models import TABLES, of_model

from mplug.model.build import allocate_parts, build_model
from mplug.model.memory import initialize
from mplug.run.run import Run
from mplug_sampling.decoding import ALONE, sample
from mplug_sampling.sampler import Sampler, sampling_run
from mplug_sampling.sampling import Sampling, sample_key
from mplug_sampling.token_steps import Replays
from mplug_testing.harness import as_rank, tiny_config

SHAPE: dict[str, Any] = {**of_model(TABLES["sampled"]), "trainer.precision": "fp64", "trainer.device": "cpu"}
FAMILIES = {family: of_model(fields) for family, fields in TABLES["sampled families"].items()}
PROMPTS = [[1], [200, 7, 7], [5] * 9, [*range(40, 54)], [3, 1], [*range(7)], [9, 8, 7, 6, 5, 4, 3], [*range(100, 111)]]
"""Eight prompts of eight lengths, from 1 to 14 tokens (two have 7)."""
TOKENS, CONTEXT, PLAIN = 8, 64, Sampling(1.0)


def built(settings: dict[str, Any], *, padded: bool = True, graphs: bool = False) -> tuple[Run, Sampler]:
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
