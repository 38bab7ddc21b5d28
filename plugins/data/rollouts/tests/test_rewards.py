"""Functions of rewards run in processes: their results, failures and time limits, and what advantages follow."""

import math
from pathlib import Path
from statistics import stdev

import pytest
from mplug_rollouts.groups import advantages
from mplug_rollouts.rewards import Functions, Group

from mplug import UsageError

FILE = Path(__file__).with_name("rewarding.py")


def named(*names: str) -> list[str]:
    return [f"{FILE}:{name}" for name in names]


def group(*completions: str) -> Group:
    return Group("prompts.jsonl:7", "a prompt", completions, {"answer": "x"})


def rewarded(names: list[str], *groups: Group, weights: list[float] | None = None, seconds: float = 60.0) -> list:  # type: ignore[type-arg]
    functions = Functions(names, weights, seconds, 2)
    try:
        return functions.of(groups)
    finally:
        functions.close()


def test_rewards_are_weighted_sums_and_none_adds_nothing() -> None:
    """Columns reach the functions; a completion that no function rewards has no reward."""
    first, second = rewarded(named("by_answer", "length"), group("x", "yy"), group("", "xxx"), weights=[10.0, 0.5])
    assert first.totals == [10.5, 1.0]
    assert second.totals == [0.0, 1.5]
    assert first.of_functions == [[1.0, 0.0], [1.0, 2.0]]
    assert math.isnan(second.of_functions[0][0])
    ((_, missing),) = [one.totals for one in rewarded(named("by_answer"), group("x", ""))]
    assert math.isnan(missing)


def test_a_function_that_needs_too_long_is_ended_and_the_next_prompt_is_rewarded() -> None:
    slow, fast = rewarded(named("endless", "length"), group("slow", "b"), group("a", "bb"), seconds=1.5)
    assert (slow.timeouts, fast.timeouts) == (1, 0)
    assert all(map(math.isnan, slow.totals))
    assert fast.totals == [2.0, 3.0]


def test_the_signals_that_stop_a_run_end_no_function() -> None:
    """The run finishes its step, which needs the rewards. The process has a group of its own, which Ctrl-C misses."""
    assert rewarded(named("interrupted"), group("a", "b"))[0].totals == [1.0, 1.0]


FAULTS = {
    "failing": r"the reward '.*:failing' failed on the prompt of prompts.jsonl:7: KeyError: 'no such thing'; correct",
    "too_few": "it returned 1 rewards for 2 completions",
    "infinite": "it returned the reward -inf, which is no finite number",
    "dying": "the reward '.*:dying' on the prompt of prompts.jsonl:7 ended its process with status 3",
    "texts": "it returned the reward '1.0', which is no finite number",
    "unknown": "it returned the reward nan, which is no finite number",
    "one_number": "it returned a value of type float, not a list with a reward per completion",
    "missing": "cannot find '.*:missing': AttributeError",
}


@pytest.mark.wide("data", quick=["failing", "dying", "texts"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_function_that_fails_is_named_with_the_prompt(name: str) -> None:
    with pytest.raises(UsageError, match=FAULTS[name]):
        rewarded(named(name), group("a", "b"))


def test_names_that_lead_nowhere_are_refused() -> None:
    for name, cause in (
        ("nowhere", "no entry point of the group 'mplug.rewards'"),
        ("os:sep", "it is of type str"),
    ):
        with pytest.raises(UsageError, match=f"cannot find '{name}': ValueError: {cause}"):
            Functions([name], None, 60.0, 1).check()


def test_advantages_are_those_of_the_papers() -> None:
    """By hand: rewards minus the mean of their prompt, over a standard deviation (N - 1, as in TRL) or nothing."""
    rewards = [[1.0, 0.0, 0.0, 3.0], [2.0, 2.0, 2.0, math.nan]]
    deviation = stdev(rewards[0])
    assert advantages(rewards, "group")[0] == pytest.approx([one / (deviation + 1e-4) for one in (0.0, -1, -1, 2.0)])
    assert advantages(rewards, "group")[1] == [0.0] * 4
    assert advantages(rewards, "none") == [[0.0, -1.0, -1.0, 2.0], [0.0] * 4]
    of_all = stdev([1.0, 0.0, 0.0, 3.0, 2.0, 2.0, 2.0])
    assert advantages(rewards, "batch")[0] == pytest.approx([one / (of_all + 1e-4) for one in (0.0, -1, -1, 2.0)])
