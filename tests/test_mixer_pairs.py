"""Scans beside other features: each pair trains as one process does, or mplug refuses it with a reason."""

from typing import Any

import pytest
from scanning import HYBRID, SCANS

from mplug import UsageError
from mplug.model.build import build_model
from mplug_testing.harness import difference, tiny_run, train_ranks, train_steps
from mplug_testing.parity import require_parity

LORA: dict[str, Any] = {"adapters.lora.rank": 3}
FOUR = {**HYBRID, "model.num_layers": 4}
EXPERTS = {**HYBRID, "model.num_experts": 4, "model.moe_ffn_hidden_size": 24}
SINGLE = "trainer.micro_batch_size=1"
PAIRS: dict[str, tuple[dict[str, Any], str]] = {
    "muon": (HYBRID, "zero2 optimizer.name=muon"),
    "muon of all kinds": (SCANS, "zero2 optimizer.name=muon"),
    "zb-h1": (HYBRID, f"pp2 parallel.pp.schedule=zb-h1 {SINGLE}"),
    "zb-v": (FOUR, f"pp2 parallel.pp.schedule=zb-v {SINGLE}"),
    "zb-v of all kinds": (SCANS, f"pp2 parallel.pp.schedule=zb-v {SINGLE}"),
    "dualpipe-v": (FOUR, f"pp2 parallel.pp.schedule=dualpipe-v {SINGLE}"),
    "LoRA": ({**HYBRID, **LORA}, "tp2"),
    "LoRA of all kinds": ({**SCANS, **LORA}, "tp2"),
    "LoRA and stages": ({**HYBRID, **LORA}, "pp2"),
    "DoRA": ({**HYBRID, **LORA, "adapters.lora.dora": True}, "tp2"),
    "LoRA of experts": ({**EXPERTS, **LORA, "adapters.lora.targets": ["linear", "experts"]}, "tp2"),
    "recomputed slots": (SCANS, "zero2 memory.recompute.mode=selective memory.recompute.slots=[scan,convolution]"),
    "recomputed units": (SCANS, "tp2 memory.recompute.mode=full"),
}


@pytest.mark.wide("layouts")
@pytest.mark.parametrize("pair", PAIRS)
def test_each_pair_trains_as_one_process(pair: str) -> None:
    require_parity(*PAIRS[pair])


WIDTHS: dict[str, Any] = {
    "model.hidden_size": 64,
    "model.num_attention_heads": 8,
    "model.num_kv_heads": 4,
    "model.ffn_hidden_size": 96,
    "model.vocab_size": 64,
    "model.linear_num_key_heads": 2,
    "model.linear_key_head_dim": 16,
    "model.linear_value_head_dim": 16,
}
"""The rows of `inputs` are 336, which 16 divides, as all widths."""
BF16 = {**HYBRID, **WIDTHS, "trainer.precision": "bf16"}
FP8 = {**BF16, "trainer.precision": "fp8", "kernels.linear": "fp8", "trainer.base_modules": ["head"]}


def test_projections_of_mixers_multiply_in_fp8() -> None:
    """The products are those of FP8 (the losses are not those of bf16), and close to them."""
    narrow, base = train_steps(FP8), train_steps(BF16)
    assert narrow.losses != base.losses
    assert narrow.losses == pytest.approx(base.losses, rel=0.02)
    assert narrow.norms == pytest.approx(base.norms, rel=0.15)


@pytest.mark.wide("precision")
@pytest.mark.parametrize("layout", ["zero2", "pp2"])
def test_fp8_products_of_projections_under_a_layout_quantise_the_numbers_of_one_process(layout: str) -> None:
    ranks = train_ranks(2, {**FP8, "parallel.layout": layout})
    assert difference(ranks, train_steps(FP8), 1e-5) == ""


def test_fp8_products_of_projections_whose_widths_do_not_fit_are_refused_with_the_remedy() -> None:
    odd = {**FP8, "model.linear_key_head_dim": 6}
    with pytest.raises(UsageError, match=r"multiples of 16, and this site's weight is \d+ by 64; name the module in"):
        build_model(tiny_run(odd))
