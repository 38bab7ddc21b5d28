"""Steps of sampling with static caches: a recording gives the tokens of eager steps, and says why if there is none."""

import pytest
from sampled import FAMILIES, PROMPTS, built, texts

from mplug.model.sampling import Sampling
from mplug.model.token_steps import Replays
from mplug.testing.recording import Operations

HOT = Sampling(2.0, top_k=100, top_p=0.9, seed=7)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replayed_step_gives_the_tokens_of_eager_steps(family: str) -> None:
    """Operations of a CPU are replayed as a graph replays kernels, also for a second batch, and past a window."""
    _, model = built(FAMILIES[family])
    assert model.growing == ""
    replays = Replays(Operations)
    for prompts in (PROMPTS[:3], PROMPTS[3:6]):
        found = texts(model, prompts, sampling=HOT, replays=replays)
        assert found == texts(model, prompts, sampling=HOT)
    assert replays.num_recorded == 1
