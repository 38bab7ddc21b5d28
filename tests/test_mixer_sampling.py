"""Sampling from models with scans: states beside caches of keys and values, with prompts of different lengths."""

from typing import Any

import pytest
import torch
from scanning import HYBRID, SCANS
from torch import Tensor

from mplug.model.build import allocate_parts, build_model
from mplug.model.memory import initialize
from mplug_nn import Convolution, MixerInputs, Scan
from mplug_nn.cache import CacheSize
from mplug_nn.mixers.states import StateCache
from mplug_sampling.decoding import sample
from mplug_sampling.sampler import Sampler, sampling_run
from mplug_sampling.sampling import Sampling
from mplug_testing.cached import require_exact_cache
from mplug_testing.harness import as_rank, in_fp64, tiny_config
from mplug_testing.sampled import sampling_fault
from mplug_testing.suite import Fault

PROMPTS, NEW = ([3, 1, 2, 5, 4], [6], [1, 2, 7]), 5


@pytest.mark.parametrize("settings", [HYBRID, SCANS], ids=["hybrid", "scans"])
def test_logits_with_states_are_those_of_the_whole_text(settings: dict[str, Any]) -> None:
    require_exact_cache(settings)


@pytest.mark.parametrize("growing", [False, True], ids=["static", "growing"])
def test_greedy_texts_are_those_of_sampling_without_a_cache(growing: bool) -> None:
    def texts(uncached: str) -> list[list[int]]:
        sampler = Sampler(padded=True)
        run = as_rank(sampling_run(tiny_config(in_fp64({**HYBRID, "kernels.default": None})), sampler))
        model = build_model(run)
        assert sampler.uncached == sampler.growing == ""
        sampler.uncached, sampler.growing = uncached, "the test says so" if growing else ""
        allocate_parts(run, model)
        parameters = {name: one.data for name, one in model.parameters().items()}
        initialize(parameters, model.placements, 0, 5)
        for values in parameters.values():
            values.mul_(4.0)
        found: list[list[int]] = [[] for _ in PROMPTS]

        def take(number: int, token: int) -> bool:
            found[number].append(token)
            return False

        sample(sampler, PROMPTS, range(3), NEW, len(PROMPTS[0]) + NEW, Sampling(), take)
        return found

    cached = texts("")
    assert cached == texts("the test says so")
    assert len({tuple(text) for text in cached}) == 3


@pytest.mark.wide("layouts")
@pytest.mark.parametrize(
    ("size", "layout", "more"),
    [
        (2, "tp2", {}),
        (4, "tp4", {}),
        (2, "pp2", {}),
        (4, "tp2pp2", {}),
        (2, "ep2", {"model.num_experts": 4, "model.moe_ffn_hidden_size": 24}),
    ],
    ids=str,
)
@pytest.mark.parametrize("settings", [HYBRID, SCANS], ids=["hybrid", "scans"])
def test_every_layout_samples_the_texts_of_one_process(
    settings: dict[str, Any], size: int, layout: str, more: dict[str, Any]
) -> None:
    assert sampling_fault(size, {**settings, **more, "parallel.layout": layout}) == ""


def test_a_state_that_keeps_padding_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from mplug_nn.mixers import states

    monkeypatch.setattr(states.StaticStateCache, "_of_prompts", lambda *_: MixerInputs())
    with pytest.raises(Fault, match="differ from those of the whole text"):
        require_exact_cache(HYBRID)


# The cache itself.


def computed(module: Any, arguments: list[Tensor], again: int, calls: list[int], padding: Tensor) -> Tensor:
    """y of calls that end at the positions `calls`; the last `again` positions of each come again."""
    module.cache = module.new_cache(CacheSize(calls[-1], again, padding, int(padding.max())))
    found, end = [], 0
    for last in calls:
        again_now = again if end else 0
        module.cache.rewind(again_now)
        y = module(*(x[:, end - again_now : last] for x in arguments))
        found.append(y[:, again_now:])
        end = last
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("again", [0, 1, 3])
def test_calls_from_states_give_what_one_call_does_wherever_padding_ends(again: int) -> None:
    """Padding ends inside a call, and exactly where a call begins, and where the repeated positions do."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    length, padding = 14, torch.tensor([0, 2, 4, 6, 7])
    scan = Scan("delta", 2, 1, 3, 4, 0.5)
    q, k, v = drawn(5, length, 1, 3), drawn(5, length, 1, 3), drawn(5, length, 2, 4)
    arguments = [q, k, v, -drawn(5, length, 2).abs(), drawn(5, length, 2).sigmoid()]
    conv = Convolution(3, 4).double()
    torch.nn.init.normal_(conv.weight, generator=generator)
    for module, given in ((scan, arguments), (conv, [drawn(5, length, 3)])):
        module.serve_cache()
        with torch.no_grad():
            parts = computed(module, given, again, [4, 7, 8, 11, 12, 14], padding)
            for sample_number, before in enumerate(padding.tolist()):
                module.cache = None
                alone = module(*(x[sample_number : sample_number + 1, before:] for x in given))
                torch.testing.assert_close(parts[sample_number, before:], alone[0])


def test_a_state_cannot_be_taken_back_further_and_has_no_more_room_than_asked() -> None:
    cache = StateCache(CacheSize(3, again=1))
    with pytest.raises(ValueError, match="again=1 cannot forget 2 positions"):
        cache.rewind(2)
    with pytest.raises(ValueError, match="for 3 positions cannot hold 4"):
        cache.through(lambda *_: (torch.zeros(1), torch.zeros(1)), 4)


def test_documents_and_a_cache_exclude_each_other() -> None:
    conv = Convolution(3, 4)
    conv.cache = conv.new_cache(CacheSize(4))
    with pytest.raises(ValueError, match="pass no document lengths"):
        conv(torch.zeros(1, 4, 3), torch.tensor([[2, 2]]))
