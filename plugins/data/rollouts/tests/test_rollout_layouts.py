"""Completions that the model samples between steps, under layouts: they are those of one process."""

from dataclasses import replace
from typing import Any

import pytest
from layout_words import COMPILING
from rollout_runs import EXACT, GIVEN, TINY

from mplug import Axis, UsageError, contiguous
from mplug.model.build import build_model
from mplug_sampling import TrainedSampler
from mplug_testing.harness import difference, tiny_run, tolerance_of, train_ranks
from mplug_testing.parity import require_parity, trained_once

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


def test_ranks_with_parts_of_weights_complete_no_prompts_of_their_own() -> None:
    axis = Axis("ringo", 2, entries={"sequence": contiguous}, distance=10)
    sampler = TrainedSampler()
    assert [sampler._may_undivide(one) for one in (axis, replace(axis, splits=("heads",)))] == [True, False]


@pytest.mark.wide("layouts")
@pytest.mark.parametrize("layout", ["tp2", "pp2", "cp2", "zero2", "fsdp2"])
def test_given_completions_are_trained_on_under_every_layout(layout: str) -> None:
    require_parity({**GIVEN, "objectives.grpo.loss": "gspo"}, layout)
