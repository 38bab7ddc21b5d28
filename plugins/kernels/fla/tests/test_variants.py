"""Which variants of the library's kernels are left, by objects in place of Triton's and the library's."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from mplug_fla import Fla, limits
from mplug_fla.variants import keep, tuners
from offers import run

from mplug import Site
from mplug_nn import ConvolutionSpec

ONE, OTHER = "prepare_wy_repr_bwd_kernel", "chunk_fwd_kernel_o"
WITH_KERNELS = "fla.ops.gated_delta_rule.wy_fast"


class Autotuner:
    """What Triton keeps of a kernel."""

    def __init__(self, name: str, module: str, configs: list[Any]) -> None:
        self.base_fn = SimpleNamespace(__name__=name, __module__=module)
        self.configs, self.cache = configs, {"a shape": configs[0]}


class Heuristics:
    """A decorator around an autotuner."""

    __module__ = "triton.runtime.autotuner"

    def __init__(self, fn: Any) -> None:
        self.fn = fn


def variant(warps: int, stages: int = 3, **tiles: int) -> SimpleNamespace:
    return SimpleNamespace(num_warps=warps, num_stages=stages, kwargs=tiles)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Autotuner]:
    """Two kernels that the plugin calls, and one of the library that it does not."""
    triton = ModuleType("triton.runtime.autotuner")
    vars(triton)["Autotuner"] = Autotuner
    monkeypatch.setitem(sys.modules, triton.__name__, triton)
    every = [variant(warps, stages, BK=tile) for warps in (2, 4, 8) for stages in (2, 3) for tile in (32, 64)]
    made = {name: Autotuner(name, WITH_KERNELS, list(every)) for name in (ONE, OTHER)}
    module, another = ModuleType(WITH_KERNELS), ModuleType("fla.ops.delta_rule.wy_fast")
    vars(module).update({ONE: Heuristics(made[ONE]), OTHER: made[OTHER]})
    made["another"] = Autotuner(ONE, another.__name__, list(every))
    vars(another)[ONE] = made["another"]
    importing = ModuleType("fla.ops.kda.chunk")
    vars(importing)[ONE] = vars(module)[ONE]  # `from ... import`: found once, where it is defined
    for one in (module, another, importing):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    return made


def test_the_kernels_of_the_packages_that_the_plugin_calls_are_found_once(kernels: dict[str, Autotuner]) -> None:
    found = [(name, tuner) for name, tuner in tuners() if tuner in kernels.values()]
    assert found == [(ONE, kernels[ONE]), (OTHER, kernels[OTHER])]


def test_few_variants_are_the_middle_ones(kernels: dict[str, Autotuner]) -> None:
    keep(1)
    for name in (ONE, OTHER):
        (left,) = kernels[name].configs
        assert (left.num_warps, left.num_stages, left.kwargs) == (4, 3, {"BK": 64})
        assert kernels[name].cache == {}
    assert len(kernels["another"].configs) == 12


def test_the_setting_shortens_the_lists_when_the_plugin_is_asked(
    monkeypatch: pytest.MonkeyPatch, kernels: dict[str, Autotuner]
) -> None:
    monkeypatch.setattr(limits, "missing", lambda: "")
    site = Site("blocks.*.conv", "Convolution.core", SimpleNamespace(spec=ConvolutionSpec(4)), "blocks.0.conv")
    config = Fla.Config(variants=2)
    assert limits.supports_convolution(config, site, run()) is True
    assert len(kernels[OTHER].configs) == 2
