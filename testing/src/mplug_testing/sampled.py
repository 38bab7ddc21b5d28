"""Samples of a model that a strategy divides into stages, compared with those of one process."""

from mplug.model.build import allocate_parts, build_model
from mplug.model.memory import initialize
from mplug_sampling.decoding import Ranks, sample
from mplug_sampling.sampler import Sampler, sampling_run
from mplug_sampling.sampling import Sampling, sample_key
from mplug_testing.harness import TinySettings, as_rank, in_fp64, tiny_config
from mplug_testing.workers import WorkerFailed, run_workers

PROMPTS, NEW, SEED = ([3, 1, 2, 5, 4], [6], [1, 2, 7]), 6, 5
WIDER = 6.0
"""Factor on initial weights: then logits differ enough that other activations give other tokens."""


def sampling_fault(world_size: int, settings: TinySettings) -> str:
    """How the texts that ranks sample differ from those of one process; empty if they are equal."""
    alone = {name: value for name, value in settings.items() if not name.startswith("parallel.")}
    expected = _texts({**alone, "parallel.layout": ""})
    try:
        found = run_workers(world_size, _texts, dict(settings))
    except (WorkerFailed, TimeoutError) as error:
        return f"sampling fails: {error}"
    for rank, texts in enumerate(found):
        for prompt, text, right in zip(PROMPTS, texts, expected, strict=True):
            if text != right:
                return f"rank {rank} continues {prompt} with {text}, and one process with {right}"
    return ""


def _texts(settings: TinySettings) -> list[list[int]]:
    """Be one rank: the tokens after each prompt."""
    sampler = Sampler(padded=True)
    run = as_rank(sampling_run(tiny_config(in_fp64({"kernels.default": None, **settings})), sampler))
    model = build_model(run)
    allocate_parts(run, model)
    parameters = {name: parameter.data for name, parameter in model.parameters().items()}
    initialize(parameters, model.placements, run.rank, SEED)
    for values in parameters.values():
        values.mul_(WIDER)
    found: list[list[int]] = [[] for _ in PROMPTS]

    def take(number: int, token: int) -> bool:
        found[number].append(token)
        return False

    keys = [sample_key(SEED, number) for number in range(len(PROMPTS))]
    sample(sampler, PROMPTS, keys, NEW, len(PROMPTS[0]) + NEW, Sampling(), take, Ranks(run, sampler))
    return found
