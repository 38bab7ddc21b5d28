"""SDPA: what it claims and what it says about itself. Its numbers are the suite's to judge."""

from types import SimpleNamespace

from mplug_sdpa import SDPA

from mplug import Offer, Site
from mplug.testing import KernelSuite


class TestSDPA(KernelSuite):
    plugin = "sdpa"


def offered() -> Offer:
    (offer,) = SDPA(SDPA.Config()).offer()
    return offer


def site(dropout: float = 0.0, needs: tuple[str, ...] = ()) -> Site:
    return Site("blocks.*.attn", "Attention.core", SimpleNamespace(dropout=dropout), "blocks.0.attn", frozenset(needs))


def test_it_supplies_the_attention_core_and_nothing_else() -> None:
    assert set(offered().suppliers) == {"Attention.core"}


def test_it_supports_any_site_that_needs_no_more_than_the_values() -> None:
    assert offered().supports(site(), None) is True  # type: ignore[arg-type]
    assert offered().supports(site(dropout=0.1), None) is True  # type: ignore[arg-type]


def test_it_says_which_needs_it_does_not_meet() -> None:
    answer = offered().supports(site(needs=("varlen", "log_sum_exp")), None)  # type: ignore[arg-type]
    assert isinstance(answer, str)
    assert "log_sum_exp" in answer
    assert "varlen" in answer


def test_it_speaks_up_on_dropout_because_its_mask_depends_on_the_layout() -> None:
    assert offered().varies(site(), None) == ""  # type: ignore[arg-type]
    assert "dropout" in offered().varies(site(dropout=0.1), None)  # type: ignore[arg-type]
