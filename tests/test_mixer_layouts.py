"""Decoders whose blocks have scans, or scans and attention: under every layout they train as in one process."""

from typing import Any

import pytest
import torch
from layout_runs import difference_of
from layout_words import COMPILING
from scanning import HEADS, HYBRID, LLAMA, SCANS
from tiny_models import TABLES, of_model
from torch import Tensor

from mplug import UsageError
from mplug.model.build import build_model
from mplug_nn import Mamba2
from mplug_testing.harness import tiny_run
from mplug_testing.parity import require_parity

COMPILED = "trainer.compile=aot_eager"
LAYOUTS = (
    *("tp2", "tp4", "cp4", "tp2cp2", "cp2pp2", "cp4 parallel.cp.method=hierarchical parallel.cp.ulysses_degree=2"),
    *("cp2 parallel.cp.method=all_gather", "cp2 parallel.cp.method=ulysses"),
)
"""Those that the set `pairs` does not combine with mixers and packed samples."""


@pytest.mark.wide("layouts")
@pytest.mark.parametrize("settings", [HYBRID, SCANS], ids=["hybrid", "scans"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_as_one_process(layout: str, settings: dict[str, Any]) -> None:
    """The hybrid has fewer key heads than tp4 has ranks; intervals of cp4 are shorter than a convolution's reach."""
    require_parity(settings, layout)


BY_DOCUMENTS = "parallel.cp.method=all_gather parallel.cp.divide=documents parallel.cp.equal_length=16"


@pytest.mark.wide("layouts", quick=["cp2-hybrid-never"])
@COMPILING
@pytest.mark.parametrize("compiled", ["never", "aot_eager"])
@pytest.mark.parametrize("settings", [HYBRID, SCANS], ids=["hybrid", "scans"])
@pytest.mark.parametrize("layout", ["cp2", "cp4", "cp2tp2", "cp2pp2", "cp2fsdp2"])
def test_states_pass_through_documents_that_stay_whole(layout: str, settings: dict[str, Any], compiled: str) -> None:
    """Two samples of a micro batch, which ranks divide in different ways."""
    packed = {**settings, "trainer.micro_batch_size": 2, "trainer.compile": compiled}
    require_parity(packed, f"{layout} {BY_DOCUMENTS}")


GRANITE = {
    **LLAMA,
    **HEADS,
    "model.name": "granite",
    "model.mixer_types": ["mamba2", "attention"],
    "model.position_types": ["none"],
    "model.residual_multiplier": 0.5,
    "model.logits_divisor": 2.0,
    "model.num_experts": 4,
    "model.moe_ffn_hidden_size": 24,
    "model.num_shared_experts": 1,
}
FACTORS = ("model.residual_multiplier", "model.logits_divisor", "model.mixer_types")
NEMOTRON = {
    **{name: value for name, value in GRANITE.items() if name not in FACTORS},
    "model.name": "nemotron",
    "model.num_layers": 4,
    "model.pattern": "ME*-",
    "model.num_mtp_layers": 1,
}
KIMI = {
    **of_model(TABLES["latent experts"]),
    "data.documents": 5,
    "model.name": "kimi-linear",
    "model.num_layers": 2,
    "model.num_mtp_layers": 0,
    "model.mixer_types": ["kimi_delta", "attention"],
    "model.linear_key_head_dim": 6,
}
QWEN = {
    **HYBRID,
    "model.name": "qwen",
    "model.norm": "offset_rmsnorm",
    "model.attention_output_gate": True,
    "model.num_experts": 4,
    "model.moe_ffn_hidden_size": 24,
    "model.num_shared_experts": 1,
    "model.shared_expert_gate": True,
    "model.num_mtp_layers": 1,
}
FAMILIES = {"qwen": QWEN, "granite": GRANITE, "nemotron": NEMOTRON, "kimi-linear": KIMI}
OF_FAMILIES = ("tp2", "tp4", "pp2", "cp2", "cp4", "zero2", "fsdp2", "ep2", "tp2cp2", "cp2pp2")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", OF_FAMILIES)
@pytest.mark.parametrize(
    "compiled",
    [
        pytest.param("", marks=pytest.mark.wide("layouts"), id="eager"),
        pytest.param(COMPILED, marks=[pytest.mark.wide("compile"), COMPILING], id="compiled"),
    ],
)
def test_published_hybrids_train_under_every_layout_as_one_process(compiled: str, layout: str, family: str) -> None:
    require_parity(FAMILIES[family], f"{layout} {compiled}".strip())


ONE_GROUP = {**GRANITE, "model.linear_num_key_heads": 1}


@pytest.mark.parametrize(
    "layout",
    [
        "tp2",
        *(
            pytest.param(layout, marks=pytest.mark.wide("layouts"))
            for layout in ("tp4", "tp2 parallel.tp.sequence_parallel=false", "tp2cp2", "tp2pp2", "tp2fsdp2", "tp2ep2")
        ),
        pytest.param(f"tp2 {COMPILED}", marks=pytest.mark.wide("compile")),
    ],
)
@COMPILING
def test_ranks_that_share_a_group_of_mamba_2_train_as_in_one_process(layout: str) -> None:
    """The one group of a published Granite 4: ranks have copies of B and C, and their norms add up squares."""
    require_parity(ONE_GROUP, layout)


@pytest.mark.wide("compile")
@COMPILING
@pytest.mark.parametrize("layout", [one for one in OF_FAMILIES if one != "ep2"])
def test_compiled_units_with_scans_train_as_in_one_process(layout: str) -> None:
    require_parity(SCANS, f"{layout} {COMPILED}")


# Planted mistakes.


def leaking() -> None:
    """A document that begins where an interval does has the state of the document before it."""
    import mplug_cp.states as states

    original = states.distance_in_document
    states.distance_in_document = lambda lengths, position: original(lengths, position) + 1


def forgetting() -> None:
    """An interval has the end state of the one before it, and nothing of earlier ones."""
    import mplug_cp.states as states

    original = states._start_states

    def start_states(gathered: Tensor, places: list[int], lengths: Any, width: int, length: int) -> Tensor:
        without = torch.cat((gathered[..., :width], 0 * gathered[..., width:]), dim=-1)
        return original(without, places, lengths, width, length)

    states._start_states = start_states


def norming_alone() -> None:
    """A rank's norm has the squares of its own heads only."""
    import mplug_tp.suppliers as suppliers

    original = suppliers.offers

    def offers(*arguments: Any) -> list[Any]:
        found = original(*arguments)
        for offer in found:
            if "Mamba2.squares" in getattr(offer, "suppliers", ()):
                offer.suppliers["Mamba2.squares"] = lambda squares, _: squares * 1.0
        return found

    suppliers.offers = offers


@pytest.mark.wide("layouts")
def test_the_comparison_catches_a_norm_of_a_part_of_a_group() -> None:
    assert difference_of("tp2", ONE_GROUP, norming_alone) != ""


@pytest.mark.wide("layouts")
@pytest.mark.parametrize("mistake", [leaking, forgetting])
def test_the_comparison_catches(mistake: Any) -> None:
    assert difference_of("cp2", {**SCANS, "data.documents": 3}, mistake) != ""


# Refusals and the plan.


def _build(settings: dict[str, Any], layout: str) -> None:
    run = tiny_run({**settings, "parallel.layout": layout})
    build_model(run)
    raise AssertionError("it is accepted")


def refused(settings: dict[str, Any], layout: str) -> str:
    with pytest.raises(UsageError) as error:
        _build(settings, layout)
    return str(error.value)


def test_layouts_that_do_not_fit_the_heads_are_refused_before_launch() -> None:
    odd = {"model.linear_num_value_heads": 3, "model.linear_num_key_heads": 3}
    assert "tp=2 does not divide the 3 heads" in refused({**HYBRID, **odd}, "tp2")
    groups = {**HYBRID, "model.mixer_types": ["mamba2"], "model.linear_num_value_heads": 12}
    groups |= {"model.linear_num_key_heads": 3, "model.num_attention_heads": 4}
    assert "tp=4 does not divide the 3 kv heads" in refused(groups, "tp4")


def test_a_strategy_that_divides_a_group_of_mamba_2_and_does_not_add_up_squares_is_refused() -> None:
    mixer = Mamba2(8, 4, 2, 1, 2)
    for parameter in (mixer.inputs, mixer.conv, mixer):
        for name, value in list(parameter.named_parameters(recurse=False)):
            setattr(parameter, name, torch.nn.Parameter(torch.zeros_like(value)))
    halved = {"inputs.weight": 2 * 4 + 2 * 2 + 2, "conv.weight": 8, "conv.bias": 8, "norm": 4}
    for name, rows in {**halved, "A_log": 2, "dt_bias": 2, "D": 2}.items():
        owner, _, own = name.rpartition(".")
        module = mixer.get_submodule(owner)
        setattr(module, own, torch.nn.Parameter(getattr(module, own)[:rows]))
    mixer.out.weight = torch.nn.Parameter(mixer.out.weight[:, :4])
    with pytest.raises(ValueError, match=r"does not fill 'Mamba2\.squares'"):
        mixer.mixed(torch.zeros(1, 3, 8), None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model.mixer_types": ["kimi_delta"]}, "kimi_delta has as many key heads as value heads"),
        ({"model.linear_num_key_heads": 3}, "linear_num_key_heads=3 does not divide linear_num_value_heads=4"),
        ({"model.mixer_types": ["mamba2"] * 3}, "mixer_types has 3 entries, and num_layers is 2"),
        ({"model.mixer_types": ["mamba"]}, "mixer_types"),
    ],
)
def test_scans_that_do_not_fit_are_refused(fields: dict[str, Any], said: str) -> None:
    assert said in refused({**HYBRID, **fields}, "")


def test_the_plan_counts_the_recurrence_and_keeps_decays_without_weight_decay() -> None:
    model = build_model(tiny_run({**HYBRID, "model.mixer_types": ["gated_delta"]}))
    plain = build_model(tiny_run({**HYBRID, "model.mixer_types": ["attention"]}))
    heads, key, value, hidden = 4, 6, 8, 32
    projections = hidden * (2 * 2 * key + 2 * heads * value + 2 * heads) + heads * value * hidden
    channels = 2 * 2 * key + heads * value
    scan = 6 * (projections + 4 * channels + 3 * heads * key * value)
    attention = 6 * (hidden * (4 + 2 + 2) * 8 + hidden * hidden)
    assert model.plan.flops.per_token - plain.plan.flops.per_token == 2 * (scan - attention)
    assert model.plan.flops.per_squared_length == 0
    for name in ("A_log", "dt_bias", "norm"):
        assert not model.plan.parameters[f"blocks.*.attn.{name}"].decays
