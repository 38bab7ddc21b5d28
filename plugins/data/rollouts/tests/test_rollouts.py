"""Completions that the model samples between steps: as the trainer computes them, after a resume, as lines."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mplug_rollouts.loader import RolloutLoader
from mplug_rollouts.sources import forget_after
from rollout_runs import EXACT, GIVEN, HERE, TINY

from mplug import SAMPLED, RunError, UsageError
from mplug.commands import Filled
from mplug.model.build import build_model
from mplug.run.prepare import check_data
from mplug.training.assembly import Parts, build
from mplug_compile import compiled_graphs
from mplug_sampling import Lanes, Replays, Sampling, complete
from mplug_sampling.fast_steps import compiled_step, obstacles
from mplug_testing import DataSuite
from mplug_testing.harness import in_fp64, tiny_run
from mplug_validation import evaluate


def steps(parts: Parts, run: Any, numbers: range, lr: float = 0.02) -> list[tuple[float, float]]:
    """(loss, gradient norm) of steps."""
    found = []
    for step in numbers:
        run.step = step
        parts.stepper.forward_backward(parts.train_loader.take(run.config.trainer.global_batch_size), step)
        result = parts.stepper.update(lr, 0.0)
        found.append((float(result.loss), float(result.grad_norm)))
    return found


@pytest.mark.wide("compile")
def test_units_that_training_compiles_sample_as_they_are() -> None:
    """Each length of a prompt would be compiled anew; the completions are those of a run that compiles nothing."""
    found = []
    for backend in ("never", "aot_eager"):
        run = tiny_run(in_fp64({**TINY, "trainer.compile": backend}))
        parts = build(run)
        found.append(list(parts.train_loader.loader.take(4)))
        units = parts.model.plan.inference
        changed = [one.name for one in units if one.method in vars(parts.model.module.get_submodule(one.name))]
        assert bool(changed) == (backend != "never")
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
@pytest.mark.wide("compile")
def test_compiled_steps_of_a_model_that_trains_are_not_those_that_training_compiles() -> None:
    """The same completions, by graphs of their own: one for each kind of unit, whatever the length of a prompt."""
    run = tiny_run(in_fp64({**TINY, "trainer.compile": "aot_eager", "adapters.lora.rank": 3}))
    build(run)
    sampler = run.hooks.plugins["data/rollouts"]._sampler
    compiled, reason = compiled_step(run, sampler)
    assert (len(compiled), reason) == (len(sampler.model.plan.inference), "")
    before, prompts = compiled_graphs(), [[5, 4, 3], [6], [5, 4, 3], [7, 8]]
    found = []
    for functions in (compiled, {}):
        lanes = Lanes(sampler, 3, 49, replays=Replays(compiled=functions))
        found.append(complete(lanes, prompts, [*range(4)], 9, Sampling(), frozenset()))
    assert compiled_graphs() == before + 3
    assert [one.tokens for one in found[0]] == [one.tokens for one in found[1]]


@pytest.mark.wide("data", quick=["0.7"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_trainer_gives_tokens_the_log_probabilities_with_which_they_were_sampled(temperature: float) -> None:
    """Up to rounding: a matrix product of one position adds in another order than one of a whole sample."""
    settings = {"data.temperature": temperature, "objectives.grpo.temperature": temperature, "adapters.lora.rank": 3}
    run = tiny_run(in_fp64({**TINY, **settings}))
    parts = build(run)
    for step in (1, 2):
        run.step = step
        parts.stepper.forward_backward(parts.train_loader.take(4), step)
        result = parts.stepper.update(0.02, 0.0)
        assert float(result.statistics["sampling/logp_difference"]) < 1e-13
        assert float(result.statistics["clip_ratio/region_mean"]) == 0
        figures = run.hooks.each("step_figures", run=run, record={"step": step})
        (own,) = (found for _, found in figures if "reward" in found)
        assert 0 <= own["reward"] <= 1
        assert 0 < own["completions/mean_length"] <= 7
        assert own["reward_std"] > 0


def test_completions_that_share_pages_are_those_of_lanes_with_rows_of_their_own() -> None:
    """Also where pages run out; a run says how often."""
    found = []
    for pages in ({}, {"data.cache_tokens": 32}):
        run = tiny_run(in_fp64({**TINY, **pages}))
        parts = build(run)
        run.step = 1
        found.append(list(parts.train_loader.loader.take(4)))
        figures = [one for _, one in run.hooks.each("step_figures", run=run, record={"step": 1}) if "reward" in one]
        assert ("rollout_put_back" in figures[0]) == bool(pages)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one["tokens"], other["tokens"])
        assert torch.allclose(one[SAMPLED], other[SAMPLED], rtol=1e-11, atol=0)
    assert figures[0]["rollout_put_back"] > 0


def test_graphs_replay_the_steps_of_tokens_whatever_the_objective_runs_beside_them() -> None:
    """A reference model takes part in the steps of training, and not in sampling."""
    run = tiny_run({**TINY, "data.graphs": True, "objectives.grpo.beta": 0.1, "adapters.lora.rank": 3})
    build_model(run)
    assert obstacles(replace(run, device="cuda"), run.hooks.plugins["data/rollouts"]._sampler) == []


@pytest.mark.wide("data")
def test_a_model_learns_what_is_rewarded() -> None:
    """The held-out loss is minus the mean reward of the likeliest tokens."""
    settings = {**TINY, "objectives.grpo.loss": "dapo", "trainer.global_batch_size": 16, "data.lanes": 32}
    run = tiny_run({**settings, "data.max_tokens": 5, "trainer.precision": "fp32"})
    parts = build(run)
    before = evaluate(run, parts)
    steps(parts, run, range(1, 25), 0.01)
    after = evaluate(run, parts)
    assert -1 <= after < before - 0.3


@pytest.mark.parametrize(
    "changes", [{"adapters.lora.rank": 3}, {"objectives.grpo.beta": 0.1}], ids=["adapters", "reference"]
)
@pytest.mark.wide("data", quick=["adapters"])
def test_deterministic_runs_train_on_the_bits_of_the_sampled_log_probabilities(changes: dict[str, Any]) -> None:
    """Of the sampler's own steps, they differ by rounding."""
    found = []
    for scores in ("auto", "sampler"):
        run = tiny_run({**EXACT, **changes, "data.scores": scores})
        parts = build(run)
        for step in (1, 2):
            run.step = step
            parts.stepper.forward_backward(parts.train_loader.take(4), step)
            result = parts.stepper.update(0.02, 0.0)
            found.append(float(result.statistics["sampling/logp_difference"]))
    assert found[:2] == [0.0, 0.0]
    assert min(found[2:]) > 0.0


def test_scores_of_the_trainer_need_rollouts_of_whole_steps_and_equal_kernels(tmp_path: Path) -> None:
    few = {"data__scores": "trainer", "data__prompts_per_rollout": 3}
    assert "does not serve whole steps of one size" in refusal([{"prompt": "x"}], tmp_path, **few)
    with pytest.raises(UsageError, match="inductor compiles passes with and without gradients to different kernels"):
        build_model(tiny_run({**EXACT, "data.scores": "trainer", "trainer.compile": "inductor"}))


def test_a_kernel_whose_caches_grow_is_refused_and_never_replaced_because_it_trains_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def grows(filled: Filled, *_: object) -> bool:
        return filled.site.slot == "Attention.core" and filled.offer is not None

    monkeypatch.setattr("mplug_sampling.sampler._grows", grows)
    with pytest.raises(UsageError, match=r"caches that do not grow, .*kernels/sdpa does not offer 'static"):
        build_model(tiny_run({**TINY, "kernels.default": "sdpa"}))


def test_a_resumed_run_continues_with_the_completions_that_no_step_has_taken() -> None:
    """A rollout of 3 prompts has 12 completions, each twice; a step takes 8. The state is plain data."""
    settings = in_fp64({**TINY, "data.prompts_per_rollout": 3, "data.repeats": 2})
    run = tiny_run(settings)
    whole = build(run)
    expected = steps(whole, run, range(1, 6))
    again = tiny_run(settings)
    first = build(again)
    assert steps(first, again, range(1, 3)) == expected[:2]
    state = json.loads(json.dumps(first.train_loader.state_dict()))
    assert len(state["completions"]) == 8
    rest = build(tiny_run(settings))
    rest.train_loader.load_state_dict(state, 8)
    batches = [list(parts.train_loader.loader.take(4)) for parts in (first, rest)]
    for one, other in zip(*batches, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_completions_of_a_rollout_are_those_of_its_seed_and_prompts_alone() -> None:
    """Neither the number of lanes nor the size of micro batches changes them."""
    found = []
    for lanes, size in ((1, 1), (5, 4)):
        run = tiny_run(in_fp64({**TINY, "data.lanes": lanes, "trainer.micro_batch_size": size}))
        parts = build(run)
        batches = list(parts.train_loader.loader.take(4))
        found.append({name: torch.cat([batch[name] for batch in batches]) for name in ("tokens", "labels", SAMPLED)})
    assert torch.equal(found[0]["tokens"], found[1]["tokens"])
    assert torch.equal(found[0]["labels"], found[1]["labels"])
    torch.testing.assert_close(found[0][SAMPLED], found[1][SAMPLED], rtol=1e-12, atol=1e-12)


def test_saved_rollouts_are_given_completions_with_the_same_loss(tmp_path: Path) -> None:
    """The file of a run is read again: the same loss and gradient norm, without sampling."""
    batch = {"trainer.global_batch_size": 4}
    run = tiny_run(in_fp64({**TINY, "data.save": True}))
    run.directory = tmp_path
    parts = build(run)
    expected = steps(parts, run, range(1, 2), 0.0)
    path = tmp_path / "rollouts.jsonl"
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 1]
    given = tiny_run(in_fp64({**GIVEN, "data.path": str(path), "data.validation_path": str(path), **batch}))
    found = steps(build(given), given, range(1, 2), 0.0)
    assert found[0] == (pytest.approx(expected[0][0], abs=1e-9), pytest.approx(expected[0][1], rel=1e-6))


def test_truncated_completions_may_have_no_target() -> None:
    counts = []
    for masked in (False, True):
        run = tiny_run(in_fp64({**GIVEN, "data.mask_truncated": masked}))
        batches = list(build(run).train_loader.loader.take(4))
        counts.append(sum(int((batch["labels"] != -100).sum()) for batch in batches))
    assert 0 < counts[1] < counts[0]


def given_lines(tmp_path: Path, truncated: bool, reward: float | None) -> dict[str, Any]:
    """The settings of given completions, each prompt with one of reward 1 and one of the given reward."""
    plain = {"tokens": [97, 98], "log_probabilities": [-1.0, -1.0], "truncated": truncated}
    path = tmp_path / "lines.jsonl"
    lines = [{"prompt": f"{n}", "completions": [{**plain, "reward": one} for one in (1.0, reward)]} for n in range(9)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return in_fp64({**GIVEN, "data.path": str(path), "data.mask_truncated": True, "trainer.eval_every": 0})


def test_a_step_without_any_target_says_why(tmp_path: Path) -> None:
    parts = build(tiny_run(given_lines(tmp_path, truncated=True, reward=0.0)))
    with pytest.raises(RunError, match=r"data.max_tokens has cut off all \d+ completions of a step"):
        parts.train_loader.take(4)


def test_a_completion_that_nothing_has_rewarded_is_read_as_it_is_saved(tmp_path: Path) -> None:
    parts = build(tiny_run(given_lines(tmp_path, truncated=False, reward=None)))
    for batch in parts.train_loader.loader.take(4):
        assert not batch["advantages"].any()
        assert (batch["labels"] != -100).any()


def test_a_resumed_run_forgets_the_saved_completions_of_steps_that_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    lines = [f'{{"step": {step}}}\n' for step in (1, 1, 3, 5)]
    path.write_text("".join(lines))
    forget_after(path, 3)
    assert path.read_text() == "".join(lines[:3])
    path.write_text(lines[0] + '{"step"')  # a killed run has not ended the line
    forget_after(path, 3)
    assert path.read_text() == lines[0]


class TestRollouts(DataSuite):
    """Given completions: sampled ones need a model, and the tests above have one."""

    plugin = "rollouts"
    next_tokens = False
    settings = GIVEN
    examples = {
        "tokenizer": ["no-such-tokenizer"],
        "tokenizer_options": [{"no_such_option": 1}],
        "template_variables": [{"bos_token": "<s>"}],
        "scale": ["none"],
        "mask_truncated": [True],
    }
    beside = {"template_variables": {"data.template": "no-such-file.jinja"}}
    without_effect = dict.fromkeys(
        (
            "completions", "rewards", "reward_weights", "reward_seconds", "reward_processes", "num_generations",
            "prompts_per_rollout", "repeats", "temperature", "lanes", "graphs", "save", "validation_path",
            "cache_tokens", "server",
            "validation_percent", "log_probabilities", "template", "special_tokens", "max_tokens",
        ),
        "it is of sampled or served completions or of messages, which other tests train on",
    )  # fmt: skip


def refusal(lines: list[Any], tmp_path: Path, **changes: Any) -> str:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    given = {**TINY, "data.path": str(path), "trainer.eval_every": 0}
    try:
        run = tiny_run({**given, **{name.replace("__", "."): value for name, value in changes.items()}})
        check_data(run)
        build(run)
    except UsageError as error:
        return str(error)
    return ""


def test_what_is_wrong_with_lines_and_settings_is_one_sentence(tmp_path: Path) -> None:
    assert "lines.jsonl:1 has no 'prompt'" in refusal([{"text": "x"}], tmp_path)
    assert "message 1 of 'prompt', has no string 'role'" in refusal([{"prompt": [{"content": "x"}]}], tmp_path)
    assert "no prompt of the train split can be used (" in refusal(
        [{"prompt": f"{number}{'x' * 60}"} for number in range(20)], tmp_path
    )
    few = "which is no multiple of data.num_generations=3"
    assert few in refusal([{"prompt": "x"}], tmp_path, data__num_generations=3)
    ramp = {"schedule__batch_rampup__start": 2, "schedule__batch_rampup__increment": 2}
    assert "takes 4 completions" in refusal([{"prompt": "x"}], tmp_path, data__num_generations=8, **ramp)
    once = "one rank read for several, and all of them take part when completions are sampled"
    assert once in refusal([{"prompt": "x"}], tmp_path, parallel__read_once=True)
    current = {"objectives__grpo__old": "current", "data__prompts_per_rollout": 6}
    assert "a rollout serves 3 steps" in refusal([{"prompt": "x"}], tmp_path, **current)
    assert "do not fit into trainer.seq_length=48" in refusal([{"prompt": "x"}], tmp_path, data__max_tokens=30)
    assert "sampled completions need rewards" in refusal([{"prompt": "x"}], tmp_path, data__rewards=[])
    other = "objectives.grpo.temperature=1 is not data.temperature=0.5"
    assert other in refusal([{"prompt": "x"}], tmp_path, data__temperature=0.5)
    given = {"data__completions": "given", "data__rewards": []}
    assert "repeats has no effect" in refusal([{"prompt": "x"}], tmp_path, **given, data__repeats=2)
    assert "has no list 'completions' of 2 or more" in refusal([{"prompt": "x"}], tmp_path, **given)
    lines = [{"prompt": "x", "completions": [{"text": "a", "reward": 1}, {"text": "b", "reward": 0}]}]
    assert "completion 1, has no 'log_probabilities'" in refusal(lines, tmp_path, **given)


def test_messages_are_written_by_the_template_and_answers_end_where_it_ends_them(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": "x"}]} for n in (1, 2)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    settings = {"data.path": str(path), "data.rewards": [f"{HERE / 'rewarding.py'}:of_messages"]}
    run = tiny_run({**TINY, **settings, "data.per_sample": 1, "trainer.seq_length": 64, "trainer.eval_every": 0})
    (batch, *_) = build(run).train_loader.loader.take(4)
    tokenizer = run.hooks.call.build_tokenizer(run=run)
    first = int((batch["labels"][0] != -100).nonzero()[0])  # the last token of the prompt
    text = tokenizer.decode(batch["tokens"][0, : first + 1].tolist())
    assert text in [f"<|im_start|>user\nSay {number}<|im_end|>\n<|im_start|>assistant\n" for number in (1, 2)]


def test_a_command_that_trains_nothing_is_told_why_it_has_no_completions() -> None:
    run = tiny_run(TINY)
    loader = run.hooks.call.build_loader(run=run, split="train")
    assert isinstance(loader, RolloutLoader)
    with pytest.raises(UsageError, match="samples completions while a model trains"):
        loader.take(4)


def test_prompts_without_room_are_counted_in_the_metrics(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}+{n}=", "answer": "x"}}\n' for n in (1, 2, "9" * 30)))
    files = {"data.path": str(path), "data.validation_path": str(path)}
    run = tiny_run({**TINY, **files, "trainer.eval_every": 0})
    parts = build(run)
    parts.train_loader.loader.take(4)
    figures = run.hooks.call.step_figures(run=run, record={"step": run.step})
    assert [found["prompts/dropped"] for found in figures if found] == [1.0]
    assert "train: 2 of 3 prompts (dropped: 1 too long" in caplog.text


def test_the_tokenizer_of_plain_prompts_ends_texts_and_writes_no_conversation(tmp_path: Path) -> None:
    tokenizer = tiny_run(TINY).hooks.call.build_tokenizer(run=None)
    assert (tokenizer.end_tokens, hasattr(tokenizer, "encode_chat")) == (frozenset({256}), False)
    gone = tiny_run({**TINY, "data.path": str(tmp_path / "gone.jsonl")}).hooks.call.build_tokenizer(run=None)
    assert hasattr(gone, "encode_chat"), "the data may have moved, and the template is known"
