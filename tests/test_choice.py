"""Which default kernel fills attention on a GPU, by what kernels state: choices.yaml, on a machine without one."""

from pathlib import Path

import pytest
from choices import CONDITIONS, FAMILIES, SAMPLING, built, chosen, hopper, table

from mplug_estimates.default_kernels import about_default_kernels

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


def test_a_run_says_which_attention_plain_torch_computes_on_a_gpu_and_why() -> None:
    with hopper(chip=(10, 0)):
        run, model, _ = built("gemma", "bf16")
        (line,) = about_default_kernels(run, model)
        assert about_default_kernels(*built("llama", "bf16")[:2]) == []
        assert about_default_kernels(*built("gemma", "bf16", **{"kernels.attention": None})[:2]) == []
    assert line.startswith("plain torch computes the attention of blocks.*.attn, with all pairs of positions in memory")
    assert "triton: it does not compete: nothing has measured it on this GPU; sdpa: it does not offer soft cap" in line
    assert line.endswith("(kernels.attention=NAME, docs/kernels.md), or set kernels.attention=null to keep plain torch")


def test_a_kernel_of_a_list_that_declares_no_rate_is_named() -> None:
    run, model, _ = built("llama", "bf16", **{"kernels.default": ["sdpa", "quack"]})
    (line,) = about_default_kernels(run, model)
    assert line.startswith("quack of kernels.default competes for no slot of this model, because it declares no rate")
    assert line.endswith("name it for a kind of slots instead (kernels.KIND=quack)")


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
