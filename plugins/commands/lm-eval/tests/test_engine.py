"""Rank 0 asks the engine, and all ranks compute together what one process computes."""

from typing import Any

from mplug_lm_eval.engine import Engine, Scores, Texts
from mplug_lm_eval.tokens import Tokens
from sampled import FAMILIES, PROMPTS, built

from mplug_sampling import Sampling
from mplug_testing import run_workers

NO_TEXT = Tokens(lambda _: [], lambda _: [], lambda tokens: " ".join(map(str, tokens)), 0, "", frozenset(), "")
GREEDY = Sampling(0.0)


def answers(settings: dict[str, Any]) -> tuple[list[float], list[list[int]]] | None:
    """The scores and texts on rank 0; None on a rank that follows."""
    run, sampler = built(settings)
    engine = Engine(run, sampler, NO_TEXT, 32, 2)
    if run.rank:
        engine.follow()
        return None
    scores = engine.scores(Scores(PROMPTS[1:5], [1, 4, 7, 1]))
    texts = engine.texts(Texts(PROMPTS[:3], 5, GREEDY, ()))
    engine.finish()
    return [one.log_probability for one in scores], texts


def test_other_ranks_follow_and_the_answers_do_not_depend_on_the_layout() -> None:
    alone = answers(FAMILIES["llama"])
    assert alone is not None
    found, others = run_workers(2, answers, {**FAMILIES["llama"], "parallel.layout": "tp2"})
    assert others is None
    assert found is not None
    assert max(abs(one - other) for one, other in zip(found[0], alone[0], strict=True)) < 1e-10
    assert found[1] == alone[1]
    assert len({tuple(one) for one in alone[1]}) > 1
