"""Generated config.json files: mplug refuses them, or computes in fp64 what transformers computes, with all gradients.

A refusal is compared with the list in `config_refusals`. It says why a family refuses, also where the library ignores
the field, or where our blocks could compute the model.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from config_cases import ARCHITECTURES, Case, aliases_of, case_of, defaults_of
from config_parity import Outcome, has_no_effect, outcome_of, smallest
from config_refusals import rule_of
from config_values import Fields

EACH, FEW = 1000, 6
"""Cases of each `model_type` in the wide set, and in the quick tests, which end with the first that is equal."""


def compared(kind: str, seeds: range, folder: Path) -> list[Outcome]:
    """The outcomes of cases. A failure is reported as the smallest config that fails."""
    outcomes, failures = [], []
    for seed in seeds:
        case = case_of(kind, seed)
        outcomes.append(outcome_of(case, folder))
        if outcomes[-1].what == "failed" and len(failures) < 5:
            least, why = smallest(case, folder)
            failures.append(f"case {seed}: {why.why}: {least.fields}")
        if outcomes[-1].what == "refused":
            failures += _unlisted(case, outcomes[-1].why, folder)
        if outcomes[-1].what == "equal" and len(seeds) == FEW:
            break
    assert not failures, "\n".join(failures)
    return outcomes


def _unlisted(case: Case, reason: str, folder: Path) -> list[str]:
    """What is wrong with a refusal: no rule lists it, or the rule does not know that the library ignores the field."""
    rule = rule_of(case.fields["model_type"], reason)
    if rule is None:
        return [f"case {case.seed}: no rule lists the refusal: {reason}"]
    if not rule.computable and has_no_effect(case, reason, folder):
        return [f"case {case.seed}: the library computes the same without what is refused: {reason}: {case.fields}"]
    return []


def summary(kind: str, outcomes: list[Outcome]) -> str:
    counts = Counter(one.what for one in outcomes)
    worst = max((one.difference for one in outcomes if one.what == "equal"), default=0.0)
    lines = [f"{kind}: {len(outcomes)} configs, {counts['equal']} equal (largest difference {worst:.1e}), "]
    lines[0] += f"{counts['refused']} refused, {counts['rejected']} rejected by transformers"
    rules = Counter(rule_of(kind, one.why) for one in outcomes if one.what == "refused")
    lines += [f"  refused {number}: {rule.what}" for rule, number in rules.most_common() if rule is not None]
    errors = Counter(one.why.partition(":")[0] for one in outcomes if one.what == "rejected")
    return "\n".join([*lines, *(f"  rejected {number}: {error}" for error, number in errors.most_common())])


@pytest.mark.parametrize("number", [FEW, pytest.param(EACH, marks=pytest.mark.wide("configs"))])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_generated_configs_compute_what_the_library_computes_or_are_refused(
    kind: str, number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = compared(kind, range(number), tmp_path / "folder")
    if number == EACH:
        with capsys.disabled():
            print(f"\n{summary(kind, outcomes)}")
    assert sum(one.what == "equal" for one in outcomes) > (0 if number == FEW else EACH / 5)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_generator_reaches_every_field_of_the_library(kind: str) -> None:
    """Each field has another value than its default in a case of the wide set, so none escapes the comparison."""
    defaults, changed = defaults_of(kind), set()
    for seed in range(EACH):
        fields = case_of(kind, seed).fields
        changed |= {name for name, value in fields.items() if name not in defaults or value != defaults[name]}
    assert {*defaults, *aliases_of(kind)} <= changed


HEADS: Fields = {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
SIZES: Fields = {**HEADS, "num_hidden_layers": 2, "intermediate_size": 24, "vocab_size": 40}
EXPERTS: Fields = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 1}
RANKS: Fields = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
GROUPS: Fields = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 1}
LATENT: Fields = {
    **{name: SIZES[name] for name in SIZES if name != "head_dim"},
    **RANKS,
    **GROUPS,
    "moe_intermediate_size": 8,
    "num_key_value_heads": 2,
    "first_k_dense_replace": 0,
}
BRANCHES: Fields = {
    **{name: SIZES[name] for name in SIZES if name != "num_hidden_layers"},
    "layers_block_type": ["moe", "full_attention", "moe"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 12,
}
QWEN: Fields = {**SIZES, "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
WINDOWS: Fields = {"use_sliding_window": True, "sliding_window": 3}
SCORED: Fields = {"rope_theta": 100.0, "mscale": 0.7, "mscale_all_dim": 0.9}
YARN: Fields = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
NOTED: dict[str, tuple[str, Fields]] = {
    "one expert": ("mixtral", EXPERTS),
    "one expert, normalised": ("qwen3_moe", {**QWEN, "norm_topk_prob": True}),
    "one expert, not normalised": ("qwen3_moe", {**QWEN, "norm_topk_prob": False}),
    "one expert of a softmax over the chosen": ("gpt_oss", EXPERTS),
    "one expert of groups": ("deepseek_v3", {**LATENT, "routed_scaling_factor": 2.5}),
    "one expert of groups, not normalised": ("deepseek_v3", {**LATENT, "norm_topk_prob": False}),
    "one expert of the best group": ("deepseek_v2", {**LATENT, "topk_method": "group_limited_greedy"}),
    "the library's own YaRN": ("gpt_oss", {**EXPERTS, "num_experts_per_tok": 2}),
    "plain positions instead of it": (
        "gpt_oss",
        {**EXPERTS, "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e3}},
    ),
    "another epsilon than that of latent norms": ("deepseek_v3", {**LATENT, "q_lora_rank": 6, "rms_norm_eps": 0.1}),
    "a factor of scores": ("deepseek_v3", {**LATENT, "rope_parameters": {**YARN, **SCORED}}),
    "windows in all blocks": ("qwen3_moe", {**SIZES, **WINDOWS, "num_experts": 2, "num_experts_per_tok": 2}),
    "windows from a block on": ("qwen2", {**SIZES, **WINDOWS, "max_window_layers": 1}),
    "windows of two bases": ("gemma3_text", {**SIZES, "sliding_window": 3, "sliding_window_pattern": 2}),
    "another gate": ("llama", {**SIZES, "hidden_act": "gelu"}),
    "dense blocks alone": ("deepseek_v3", {**LATENT, "first_k_dense_replace": 2}),
    "latent experts": ("nemotron_h", {**BRANCHES, "moe_latent_size": 6}),
    "soft caps": ("gemma2", {**SIZES, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
}
"""Configs that were read wrongly once, or that few generated cases have: accepted, and equal."""


@pytest.mark.parametrize("name", NOTED)
@pytest.mark.parametrize("seed", [0, pytest.param(3, marks=pytest.mark.wide("configs"))])
def test_what_few_generated_configs_have_is_computed_as_the_library_does(name: str, seed: int, tmp_path: Path) -> None:
    kind, fields = NOTED[name]
    case = Case({"architectures": [ARCHITECTURES[kind]], "model_type": kind, **fields}, seed)
    outcome = outcome_of(case, tmp_path / "folder")
    assert outcome.what == "equal", outcome


def test_the_comparison_finds_a_difference_of_one_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that takes another epsilon, and one that loses the gradient of one tensor, fail."""
    import config_parity

    case = Case({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES, "rms_norm_eps": 1e-6}, 1)
    read = config_parity.read

    def other(folder: Path, config: Any) -> Any:
        del config
        config_parity.write_config(folder, {**case.fields, "rms_norm_eps": 1.1e-6})
        return read(folder, config_parity.settings_of(folder, "llama"))

    monkeypatch.setattr(config_parity, "read", other)
    assert outcome_of(case, tmp_path / "one").what == "failed"

    def frozen(folder: Path, config: Any) -> Any:
        model = read(folder, config)
        model.parameters()["blocks.1.norm2.weight"].requires_grad_(False)
        return model

    monkeypatch.setattr(config_parity, "read", frozen)
    outcome = outcome_of(case, tmp_path / "two")
    assert (outcome.what, "blocks.1.norm2.weight" in outcome.why) == ("failed", True)
    monkeypatch.setattr(config_parity, "read", read)
    assert outcome_of(case, tmp_path / "three").what == "equal"
