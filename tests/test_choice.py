"""Which default kernel fills attention on a GPU, by what kernels state: choices.yaml, on a machine without one."""

from pathlib import Path

import pytest
from choices import CONDITIONS, FAMILIES, SAMPLING, chosen, hopper, table

FLASH, CUDNN, MASKED = ["flash (flash-attn-4)"], ["sdpa (cuDNN)"], ["sdpa (torch's matrix products)"]
TORCH = ["sdpa (torch's choice)"]
EXPECTED = {
    ("llama", "bf16"): FLASH,
    ("llama", "fp32"): TORCH,
    ("llama", SAMPLING): TORCH,
    ("llama, heads of 32", "bf16"): CUDNN,
    ("gemma", "packed"): FLASH,
    ("gemma", "graphs"): FLASH,
    ("gemma", "fp32"): ["triton"],
    ("gemma", SAMPLING): ["plain torch"],
    ("gemma, heads of 256", "bf16"): ["triton", *TORCH],
    ("gpt-oss", "bf16"): FLASH,
    ("gpt-oss", "packed, cp2"): ["triton", *FLASH],
    ("gpt, ALiBi", "bf16"): MASKED,
    ("gpt, ALiBi", "graphs"): MASKED,
}


@pytest.mark.parametrize(("family", "condition"), EXPECTED)
def test_the_fastest_kernel_that_serves_attention_on_an_h200_fills_it(family: str, condition: str) -> None:
    with hopper():
        assert chosen(family, condition) == EXPECTED[family, condition]


def test_without_flash_attn_or_on_a_gpu_that_nothing_was_measured_on_others_fill_it() -> None:
    with hopper(flash=False):
        assert (chosen("llama", "bf16"), chosen("gemma", "bf16")) == (CUDNN, ["triton"])
    with hopper(chip=(10, 0)):
        assert (chosen("llama", "bf16"), chosen("gemma", "bf16")) == (CUDNN, ["plain torch"])


@pytest.mark.wide("layouts")
def test_the_page_has_the_choice_of_every_family() -> None:
    with hopper():
        assert table() in (Path(__file__).parent.parent / "docs" / "kernels.md").read_text()


@pytest.mark.wide("layouts")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_served_with_static_caches_where_it_samples(family: str) -> None:
    """No condition but context parallelism is refused, and no choice makes the caches of sampling grow."""
    with hopper():
        for condition in (*CONDITIONS, SAMPLING):
            if condition != "packed, cp2":
                assert all("grow" not in label for label in chosen(family, condition)), condition
