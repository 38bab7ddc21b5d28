"""Strategies that change numerics: what they declare, how far suites let them go, and that nothing bypasses them.

`acme-squeeze` sums gradients in bf16, as a third party would write it.
"""

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from layout_words import layouts

from mplug import UsageError, Variance
from mplug.cli import main
from mplug.model.build import build_model
from mplug_testing import Fault, ParallelSuite
from mplug_testing.harness import tiny_run, train_ranks

Plant = Callable[..., None]
DECLARED = 'return Variance(REASON, tolerance=2.0**-6, sums=("squeeze",))'
BEFORE_OTHERS = "layer = -1"
SUMMED = "sinks.reduced_over.update(*summed.values())"
FIRST_STAGE = {"model.frozen": ["embedding", "blocks.0", "blocks.1"]}


class Squeezed(ParallelSuite):
    plugin = "squeeze"
    layouts = ("squeeze2",)


def require_parity(layout: str) -> None:
    Squeezed().test_a_layout_gives_the_run_of_one_process(layout)


@pytest.mark.parametrize(
    "declared", ["return None", DECLARED.replace("2.0**-6", "1e-6")], ids=["nothing", "too little"]
)
@pytest.mark.wide("suites")
def test_the_suite_fails_a_strategy_that_varies_by_more_than_it_declares(plant: Plant, declared: str) -> None:
    plant("acme-squeeze", DECLARED, declared)
    with pytest.raises(Fault, match=r"gradient of .* has an error of"):
        require_parity("squeeze2")


def test_the_suite_fails_a_strategy_that_another_one_bypasses(plant: Plant) -> None:
    """Without the axes in its declaration, the host cannot know that the optimizer's sharding sums in its stead."""
    plant("acme-squeeze", DECLARED, DECLARED.replace('("squeeze",)', "()"))
    said = r"equals one process up to rounding .*, although the strategy declares .* bypasses"
    with pytest.raises(Fault, match=said):
        require_parity("squeeze2zero2")


@pytest.mark.parametrize("layout", ["squeeze2zero2", "zero2squeeze2"])
def test_a_sharded_optimizer_that_would_sum_in_its_stead_is_refused_before_launch(plant: Plant, layout: str) -> None:
    plant("acme-squeeze")
    with pytest.raises(UsageError) as caught:
        build_model(tiny_run({"parallel.layout": layout}))
    both = "parallel/zero and parallel/squeeze would both sum gradients over the axis 'squeeze'"
    for words in (f"layout '{layout}'", both, "parallel/squeeze declares its own way", "without 'zero'"):
        assert words in str(caught.value)


IN_ITS_STEAD = "parallel/dp and parallel/squeeze would both sum gradients over the axis"
ON_ONE_RANK = r"squeeze names the axis 'squeeze' in .*reduced_over on rank 2, and not on ra"
OF_ITS_OWN = "sinks.reduced_over.update(*(trained[name] for name in sinks))"


@pytest.mark.parametrize(
    ("change", "layout", "settings", "said"),
    [
        ((BEFORE_OTHERS, "layer = 1"), "squeeze2dp2", {}, IN_ITS_STEAD),
        ((SUMMED, ""), "squeeze2", {}, r"parallel/squeeze declares .* sinks.reduced_over lacks this axis"),
        ((SUMMED, OF_ITS_OWN), "squeeze2pp2", FIRST_STAGE, ON_ONE_RANK),
    ],
    ids=["replicas sum", "the host sums", "ranks name different axes"],
)
def test_a_sum_that_another_one_would_make_is_refused(
    plant: Plant, change: tuple[str, str], layout: str, settings: dict[str, Any], said: str
) -> None:
    plant("acme-squeeze", *change)
    with pytest.raises(UsageError, match=said):
        train_ranks(2 if layout == "squeeze2" else 4, {**Squeezed.at(layout), **settings})


@pytest.mark.parametrize("layout", layouts(["squeeze2", "squeeze2fsdp2"], ["squeeze2dp2"]))
@pytest.mark.wide("layouts", quick=["squeeze2"])
def test_the_suite_holds_a_strategy_to_the_tolerance_that_it_declares(plant: Plant, layout: str) -> None:
    """It requires an error above that of rounding too, so that no other strategy sums in its stead."""
    plant("acme-squeeze")
    require_parity(layout)


def test_a_stage_without_trained_parameters_names_the_axes_of_the_others(plant: Plant) -> None:
    plant("acme-squeeze")
    Squeezed()._require_parity("squeeze2pp2", FIRST_STAGE)


def test_explain_shows_what_varies_and_by_how_much(plant: Plant) -> None:
    plant("acme-squeeze")
    shown = CliRunner().invoke(main, ["explain", "--parallel", "squeeze2", "--set", "trainer.device=cpu"])
    said = shown.output.partition("Depends on the layout\n")[2]
    assert "parallel/squeeze: gradients are rounded to bf16 before they are summed" in said
    assert "(relative error up to 0.016)" in said


@pytest.mark.parametrize("strategy", ["zero", "fsdp"])
def test_bundled_strategies_declare_sums_in_bf16(strategy: str) -> None:
    settings = {"parallel.layout": f"{strategy}2"}
    assert tiny_run(settings).variances == {}
    (variance,) = tiny_run({**settings, f"parallel.{strategy}.reduce_dtype": "bf16"}).variances.values()
    assert "bf16" in variance.reason


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (
            DECLARED.replace('("squeeze",)', '("squeze",)'),
            r"axis 'squeze', which the mesh .*; did you mean 'squeeze'\?",
        ),
        ("return REASON", "the hook 'varies' of parallel/squeeze returned 'gradients are rounded"),
    ],
    ids=["an unknown axis", "no variance"],
)
def test_a_declaration_that_means_nothing_is_refused(plant: Plant, declared: str, said: str) -> None:
    plant("acme-squeeze", DECLARED, declared)
    with pytest.raises(UsageError, match=said):
        tiny_run({"parallel.layout": "squeeze2"})


@pytest.mark.parametrize("tolerance", [0.0, 1.0, -1e-3, float("nan")])
def test_a_tolerance_that_is_none_is_an_error(tolerance: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        Variance("rounded", tolerance, sums=())
