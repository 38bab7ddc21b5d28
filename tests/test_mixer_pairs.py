"""Scans beside other features: each pair trains as one process does, or mplug refuses it with a reason."""

from typing import Any

import pytest
from scanning import HYBRID, SCANS

from mplug import UsageError
from mplug.model.build import build_model
from mplug_testing.harness import difference, tiny_run, train_ranks, train_steps
from mplug_testing.parity import require_parity

SLOTS = "memory.recompute.mode=selective memory.recompute.slots=[scan,convolution]"


@pytest.mark.wide("layouts")
def test_recomputed_scans_and_convolutions_train_as_in_one_process() -> None:
    """The set `pairs` has scans beside optimizers, schedules, adapters, and recomputed units."""
    require_parity(SCANS, f"zero2 {SLOTS}")


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
