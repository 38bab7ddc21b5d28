"""Mixing of tokens is declared: layouts that divide what a module mixes are refused, the others are right."""

from collections.abc import Callable
from typing import Any

import pytest

from mplug import UsageError
from mplug.build import build_model
from mplug.testing.harness import tiny_run
from mplug.testing.parity import error_of

Settings = dict[str, Any]
LENTO: Settings = {
    "model": {"name": "lento", "preset": None},
    "model.num_layers": 3,
    "model.hidden_size": 32,
    "model.state_size": 24,
    "model.vocab_size": 259,
}


def refusal(settings: Settings) -> str:
    with pytest.raises(UsageError) as caught:
        build_model(tiny_run(settings))
    return str(caught.value)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "zero2", "fsdp2"])
def test_a_recurrence_computes_what_one_process_does(layout: str, plant: Callable[..., None]) -> None:
    plant("nova-lento")
    assert error_of(LENTO, layout) < 1e-10


def test_x(plant):
    plant("nova-lento")
    print(refusal({**LENTO, "parallel.layout": "cp2"}))
    plant("nova-lento", '    mixes: ClassVar[frozenset[str]] = frozenset({"sequence"})\n', "")
    print(refusal({**LENTO, "parallel.layout": "cp2"}))
    build_model(tiny_run({**LENTO, "parallel.layout": "tp2"}))
    plant("nova-peregrine")
    print(refusal({"model": {"name": "peregrine"}, "parallel.layout": "tp2"}))
    print(refusal({"model": {"name": "peregrine"}, "parallel.layout": "cp2"}))
