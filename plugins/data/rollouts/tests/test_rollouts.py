"""Completions that the model samples between steps: as the trainer computes them, under layouts, after a resume."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_words import COMPILING
from mplug_rollouts.loader import RolloutLoader
from mplug_rollouts.sources import forget_after

from mplug import SAMPLED, RunError, UsageError
from mplug.commands import Filled
from mplug.model.build import build_model
from mplug.run.prepare import check_data
from mplug.training.assembly import Parts, build
from mplug_compile import compiled_graphs
from mplug_sampling import Lanes, Replays, Sampling, complete
from mplug_sampling.fast_steps import compiled_step, obstacles
from mplug_testing import DataSuite
from mplug_testing.harness import difference, in_fp64, tiny_run, tolerance_of, train_ranks
from mplug_testing.parity import require_parity, trained_once
from mplug_validation import evaluate

HERE = Path(__file__).parent
TINY: dict[str, Any] = {
    "data.name": "rollouts",
    "data.path": str(HERE / "prompts.jsonl"),
    "data.rewards": [f"{HERE / 'rewarding.py'}:share_of_a"],
    "data.num_generations": 4,
    "data.max_tokens": 7,
    "data.lanes": 3,
    "data.per_sample": 2,
    "data.validation_percent": 30,
    "objectives.grpo.loss": "grpo",
    "trainer.seq_length": 48,
    "trainer.global_batch_size": 4,
    "trainer.eval_samples": 2,
    "kernels.default": None,
    "optimizer.lr": 0.02,
}
GIVEN: dict[str, Any] = {
    **{name: value for name, value in TINY.items() if name not in ("data.rewards", "trainer.global_batch_size")},
    "data.completions": "given",
    "data.path": str(HERE / "given.jsonl"),
}


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


CISPO: dict[str, Any] = {**TINY, "objectives.grpo.loss": "cispo", "objectives.grpo.epsilon_high": 5.0}
"""A loss that is not zero in the first step, where all ratios are 1 and advantages add to zero."""
EXPERTS: dict[str, Any] = {
    "model.name": "mixtral",
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 2,
    "model.ffn_hidden_size": 40,
    "model.num_experts": 4,
    "model.num_experts_per_token": 2,
    "model.moe_ffn_hidden_size": 12,
    "model.moe_balance": "sequence",
    "model.vocab_size": 300,
}
BY_DOCUMENTS = "parallel.cp.method=all_gather parallel.cp.divide=documents"
LAYOUTS = [
    *("dp2", "zero2", "fsdp2", "pp2", "fsdp2pp2"),
    *("tp2", "tp2 parallel.tp.sequence_parallel=false", "tp2pp2", "zero2tp2"),
    *("cp2", "cp2 parallel.cp.method=ulysses", f"cp2 {BY_DOCUMENTS}", "cp2dp2", "cp2tp2", "cp2pp2", "fsdp2cp2"),
    "cp4 parallel.cp.method=hierarchical parallel.cp.ulysses_degree=2",
]


@COMPILING
@pytest.mark.parametrize(
    ("layout", "backend"),
    [*((one, "never") for one in LAYOUTS), *((one, "aot_eager") for one in ("dp2", "fsdp2pp2", "tp2", "cp2"))],
)
@pytest.mark.wide("layouts")
def test_a_layout_samples_and_computes_what_one_process_does(layout: str, backend: str) -> None:
    """Ranks that divide the positions of samples in training sample whole texts, and divide these afterwards."""
    require_parity({**CISPO, "trainer.micro_batch_size": 1, "trainer.compile": backend}, layout)


@pytest.mark.parametrize("layout", ["fsdp2", "fsdp2pp2", "fsdp2tp2", "fsdp2cp2"])
@pytest.mark.wide("layouts")
def test_weights_that_are_gathered_for_every_token_sample_what_one_process_does(layout: str) -> None:
    require_parity_by_units({**CISPO, "trainer.micro_batch_size": 1}, layout)


def require_parity_by_units(settings: dict[str, Any], layout: str) -> None:
    """One process has no weights to gather, so it is refused with this setting."""
    own = {**settings, "parallel.layout": layout, "data.gather": "units"}
    traces = train_ranks(tiny_run(own).mesh.world_size, own)
    assert difference(traces, trained_once(settings)[0], tolerance_of(own)) == ""


HYBRID: dict[str, Any] = {
    "model.name": "qwen",
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 2,
    "model.ffn_hidden_size": 40,
    "model.vocab_size": 300,
    "model.mixer_types": ["gated_delta", "attention"],
    "model.linear_num_key_heads": 2,
    "model.linear_key_head_dim": 6,
    "model.linear_value_head_dim": 8,
}
LATENT: dict[str, Any] = {
    **EXPERTS,
    "model.name": "deepseek",
    "model.num_kv_heads": None,
    "model.q_lora_rank": 12,
    "model.kv_lora_rank": 12,
    "model.qk_nope_head_dim": 8,
    "model.qk_rope_head_dim": 4,
    "model.v_head_dim": 6,
    "model.num_dense_layers": 1,
    "model.moe_router_num_groups": 2,
    "model.moe_router_top_groups": 1,
}
MODELS = {
    "gpt with learned positions": {"model.position": "learned"},
    "hybrid": HYBRID,
    "experts": EXPERTS,
    "latent attention": LATENT,
    "adapters": {"adapters.lora.rank": 3},
    "pages": {"data.cache_tokens": 32},
    "reference": {"objectives.grpo.beta": 0.1},
}


@pytest.mark.parametrize("layout", ["tp2", "cp2"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.wide("layouts")
def test_models_whose_positions_ranks_divide_sample_what_one_process_does(model: str, layout: str) -> None:
    require_parity({**CISPO, **MODELS[model]}, layout)


@pytest.mark.parametrize(("layout", "is_divided"), [("dp2", False), ("tp2", True)])
def test_a_model_samples_in_a_form_of_its_own_and_trains_as_without_sampling(layout: str, is_divided: bool) -> None:
    """No slot of training needs what caches need; sampling has the suppliers of whole sequences."""
    run = tiny_run({**TINY, "parallel.layout": layout})
    attention = build_model(run).module.get_submodule("blocks.0.attn")
    before = dict(vars(attention)), dict(vars(attention.qkv))
    assert not attention.spec.own_key_length
    with run.hooks.plugins["data/rollouts"]._sampler.sampling():
        assert attention.spec.own_key_length
        assert (attention.qkv.gather is not before[1]["gather"]) == is_divided
    assert (dict(vars(attention)), dict(vars(attention.qkv))) == before


@pytest.mark.parametrize(
    "layout", ["ep2", "fsdp2ep2", "fsdp2cp2ep2", "pp2ep2dp2", "cp2ep2", "cp2ep2dp2", "tp2ep2", "tp2ep2dp2", "tp2etp2"]
)
@pytest.mark.wide("layouts", quick=["fsdp2cp2ep2"])
def test_ranks_that_exchange_the_tokens_of_experts_sample_what_one_process_does(layout: str) -> None:
    """Their texts end at different steps, and they exchange tokens until all have ended."""
    require_parity({**CISPO, **EXPERTS}, layout)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("ep2", EXPERTS),
        ("ep2", {**EXPERTS, "parallel.ep.dispatch": "once_per_rank"}),
        ("ep2", {**EXPERTS, "parallel.ep.overlap": True}),
        ("fsdp2", {}),
        ("cp2", {}),
        ("cp2ep2", EXPERTS),
    ],
    ids=["ep2", "once_per_rank", "overlap", "fsdp2", "cp2", "cp2ep2"],
)
@pytest.mark.wide("layouts")
def test_ranks_without_any_prompt_of_a_rollout_wait_for_no_rank_and_let_none_wait(
    layout: str, changes: dict[str, Any]
) -> None:
    """A rollout has one prompt, whose completions serve the step: one of the two ranks has none."""
    few = {"data.num_generations": 8, "data.prompts_per_rollout": 1}
    check = require_parity_by_units if layout == "fsdp2" else require_parity
    check({**CISPO, **few, **changes}, layout)


EXACT: dict[str, Any] = {**TINY, "trainer.deterministic": True, "trainer.precision": "fp32"}


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


@pytest.mark.wide("layouts")
def test_completions_under_a_layout_may_share_pages_which_run_out() -> None:
    require_parity({**CISPO, "data.cache_tokens": 32}, "pp2")
    require_parity_by_units({**CISPO, "data.cache_tokens": 32}, "fsdp2")


BITS: dict[str, dict[str, Any]] = {
    "tp2": {"adapters.lora.rank": 3},
    "tp2 without sequence parallelism": {"adapters.lora.rank": 3, "parallel.tp.sequence_parallel": False},
    "cp2": {"adapters.lora.rank": 3},
    "cp2 by documents": {"parallel.cp.method": "all_gather", "parallel.cp.divide": "documents"},
    "cp4 hierarchical": {"parallel.cp.method": "hierarchical", "parallel.cp.ulysses_degree": 2},
    "cp2pp2": {},
    "pp2": {"adapters.lora.rank": 3},
    "fsdp2": {"adapters.lora.rank": 3},
    "ep2": EXPERTS,
    "ep2 bounded": {**EXPERTS, "parallel.ep.dispatch": "bounded"},
}


@pytest.mark.parametrize("case", BITS)
@pytest.mark.wide("layouts")
def test_layouts_train_on_the_bits_of_the_sampled_log_probabilities(case: str) -> None:
    settings = {**EXACT, **BITS[case], "parallel.layout": case.split()[0]}
    for trace in train_ranks(tiny_run(settings).mesh.world_size, settings):
        assert [float(one["sampling/logp_difference"]) for one in trace.statistics] == [0.0] * len(trace.losses)


def test_scores_of_the_trainer_need_rollouts_of_whole_steps_and_equal_kernels(tmp_path: Path) -> None:
    few = {"data__scores": "trainer", "data__prompts_per_rollout": 3}
    assert "does not serve whole steps of one size" in refusal([{"prompt": "x"}], tmp_path, **few)
    with pytest.raises(UsageError, match="inductor compiles passes with and without gradients to different kernels"):
        build_model(tiny_run({**EXACT, "data.scores": "trainer", "trainer.compile": "inductor"}))


@pytest.mark.parametrize(("layout", "dispatch"), [("etp2", "all_to_all"), ("ep2", "all_gather")])
def test_exchanges_of_equal_sizes_are_refused_because_texts_differ_in_length(layout: str, dispatch: str) -> None:
    settings = {**TINY, **EXPERTS, "parallel.layout": layout, "parallel.ep.dispatch": dispatch}
    with pytest.raises(UsageError, match="does not declare that ranks may exchange tensors of different sizes"):
        build_model(tiny_run(settings))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "graphs ep2": ({**EXPERTS, "data.graphs": True}, r"exchange activations \(ep=2\)"),
    "graphs fsdp2": ({"data.graphs": True}, "gathered for each rollout"),
    "graphs cp2": ({"data.graphs": True}, r"the ranks of parallel/cp divide positions in training \(cp=2\)"),
    "experts tp2ep2": (
        {**EXPERTS, "parallel.tp.sequence_parallel": False},
        "divides the positions of a call among 2 ranks; .*as data parallelism",
    ),
    "gather dp2": ({"data.gather": "units"}, "every rank of the layout 'dp2' has whole weights"),
    "gather tp2pp2": ({"data.gather": "units"}, "every rank of the layout 'tp2pp2' has whole weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_layout_does_not_serve_is_refused_before_launch(case: str) -> None:
    settings, reason = REFUSED[case]
    with pytest.raises(UsageError, match=reason):
        build_model(tiny_run({**TINY, **settings, "parallel.layout": case.split()[1]}))


@pytest.mark.parametrize(
    ("layout", "reason"),
    [("cp2", r"divides the sequence of a sample \(cp=2\), which grows"), ("tp2", "divides the positions of a call")],
)
def test_strategies_that_do_not_say_what_they_offer_for_whole_samples_are_refused(
    layout: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mplug_sampling.sampler.OWN", "build_stepper")
    with pytest.raises(UsageError, match=reason):
        build_model(tiny_run({**TINY, "parallel.layout": layout}))


def test_a_kernel_whose_caches_grow_is_refused_and_never_replaced_because_it_trains_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def grows(filled: Filled, *_: object) -> bool:
        return filled.site.slot == "Attention.core" and filled.offer is not None

    monkeypatch.setattr("mplug_sampling.sampler._grows", grows)
    with pytest.raises(UsageError, match=r"caches that do not grow, .*kernels/sdpa does not offer 'static"):
        build_model(tiny_run({**TINY, "kernels.default": "sdpa"}))


@pytest.mark.wide("layouts")
@pytest.mark.parametrize("layout", ["tp2", "pp2", "cp2", "zero2", "fsdp2"])
def test_given_completions_are_trained_on_under_every_layout(layout: str) -> None:
    require_parity({**GIVEN, "objectives.grpo.loss": "gspo"}, layout)


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
