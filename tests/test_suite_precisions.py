"""The suite for precisions: a sound third-party precision passes it, and it catches what authors get wrong."""

from collections.abc import Callable

import pytest
from mplug_testing import Fault, PrecisionSuite


class Tinto(PrecisionSuite):
    plugin = "tinto"
    settings = {"kernels.linear": "press"}


@pytest.mark.wide("suites")
def test_a_sound_precision_passes(own_tests: Callable[..., str]) -> None:
    assert "failed" not in own_tests("nova-tinto")


BITS = 'bits = recipe.options["bits"] if recipe is not None and recipe.name == SHORT else 24'


def operands() -> None:
    Tinto().test_every_operand_of_its_products_is_rounded()


FAULTS = {
    "the activation gradient is not rounded": (
        "return pressed(grad_y, bits) @ pressed(weight, bits)",
        "return grad_y @ weight",
        operands,
        "kernels/press does not round the grad_y of dgrad",
    ),
    "the weight is not rounded in backward": (
        "return pressed(grad_y, bits) @ pressed(weight, bits)",
        "return pressed(grad_y, bits) @ weight",
        operands,
        "kernels/press does not round the weight of dgrad",
    ),
    "the weight gradient reads the gradient as it is": (
        "product = pressed(grad_y, bits).flatten",
        "product = grad_y.flatten",
        operands,
        "kernels/press does not round the grad_y of wgrad",
    ),
    "the forward pass reads the weight as it is": (
        "F.linear(pressed(x, bits), pressed(weight, bits))",
        "F.linear(pressed(x, bits), weight)",
        operands,
        "kernels/press does not round the weight of forward",
    ),
    "a setting for operands is ignored": (
        BITS,
        "bits = 11",
        lambda: Tinto().test_every_field_of_its_config_has_an_effect(),
        "the field 'bits' of 'tinto' has no effect: with 12, 22, 10 and 5 the suite sees what it sees with 11",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_suite_catches_a_precision_of_which(fault: str, plant: Callable[..., None]) -> None:
    old, new, check, words = FAULTS[fault]
    plant("nova-tinto", old, new)
    with pytest.raises(Fault) as caught:
        check()
    assert words in str(caught.value)
