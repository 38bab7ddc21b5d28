"""Compares the logits of sampling with a cache with those of the whole text, position by position, in fp64."""

from unittest import SkipTest

import torch
from torch import Tensor

from mplug.errors import UsageError
from mplug.model.build import allocate_parts, build_model
from mplug.model.memory import initialize
from mplug.model.model import Model
from mplug.run.run import Run
from mplug_sampling.decoding import Alone, sample
from mplug_sampling.sampler import Sampler, sampling_run
from mplug_sampling.sampling import Sampling
from mplug_testing.harness import TinySettings, as_rank, in_fp64, tiny_config
from mplug_testing.suite import Fault

ENTRIES = {"tokens", "positions", "sample_ids", "keys"}
"""The entries that sampling has."""
PROMPTS, NEW, SEED = ((3, 1, 2, 5, 4), (6,), (1, 2, 7)), 4, 5
EXACT = 1e-9
"""Maximum difference, relative to the largest logit."""


class _Recording(Alone):
    """Keeps the logits from which each token is drawn."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def whole_vocabulary(self, logits: Tensor) -> Tensor:
        """The logits, unchanged."""
        self.logits.append(logits.clone())
        return logits


def require_exact_cache(settings: TinySettings) -> None:
    """Raise Fault if logits with a cache differ; SkipTest if the model is sampled from without one, or not at all."""
    sampler = Sampler(padded=True)
    run = as_rank(sampling_run(tiny_config({"kernels.default": None, **in_fp64(settings)}), sampler))
    (owner,) = run.hooks.implementers("build_model")
    model = _built(run)
    used = {name for unit in model.plan.inference for name in unit.inputs} & set(model.plan.context)
    if not used <= ENTRIES:
        raise SkipTest(f"sampling has no entry '{min(used - ENTRIES)}'")
    if sampler.uncached:
        raise SkipTest(f"{owner} is sampled from without a cache, because {sampler.uncached}")
    recording, texts = _Recording(), [list(prompt) for prompt in PROMPTS]

    def take(number: int, token: int) -> bool:
        texts[number].append(token)
        return False

    room = len(PROMPTS[0]) + NEW
    sample(sampler, PROMPTS, range(len(PROMPTS)), NEW, room, Sampling(temperature=2.0), take, recording)
    for number, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        found = torch.stack([logits[number] for logits in recording.logits])
        whole = _logits(model, text[:-1])[len(prompt) - 1 :]
        difference = float((found - whole).abs().max() / whole.abs().max())
        if not difference < EXACT:
            raise Fault(
                f"with a cache, the logits of prompt {number + 1} differ from those of the whole text by "
                f"{difference:.1e} (relative to the largest); a module that declares `caches` or `mixes` uses "
                f"something else than its new positions, their `positions`, and its cache"
            )


def require_refused_sampling(settings: TinySettings) -> None:
    """Raise Fault if a model whose attention sees later tokens is sampled from."""
    run = as_rank(sampling_run(tiny_config({"kernels.default": None, **settings}), Sampler(padded=True)))
    try:
        build_model(run)
    except UsageError:
        return
    raise Fault("the suite has 'causal = False', and sampling does not refuse the model")


def _built(run: Run) -> Model:
    with torch.device("meta"):
        is_sampled = bool(run.hooks.call.build_model(run=run).plan.inference)
    if not is_sampled:
        raise SkipTest("the plan has no units of inference, so 'mplug generate' cannot sample from the model")
    model = build_model(run)
    allocate_parts(run, model)
    generator = torch.Generator().manual_seed(SEED)
    initialize({name: one.data for name, one in model.parameters().items()}, model.placements, 0, SEED)
    for parameter in model.parameters().values():
        parameter.data.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def _logits(model: Model, text: list[int]) -> Tensor:
    """The logits [S, V] of a whole text, without a cache."""
    zero = torch.zeros(1, dtype=torch.int64)
    positions = torch.arange(len(text))[None]
    entries = {"tokens": torch.tensor([text]), "positions": positions, "sample_ids": zero, "keys": zero}
    return model.logits(entries)[0]
