"""Parameters that two pipeline stages share: their gradients are those of one process, wherever the stages begin.

Multi-token prediction uses the embedding, the last norm and the projection to the vocabulary; tied embeddings make the
first and the last of these one parameter. So the stages have the shared parameters in different orders.
"""

from functools import cache
from typing import Any

import pytest
from tiny_models import DECODER

from mplug_testing.harness import Trace, difference, train_ranks, train_steps

Settings = dict[str, Any]
LLAMA: Settings = {
    **DECODER,
    "model.name": "llama",
    "model.num_layers": 4,
    "model.num_mtp_layers": 1,
    "model.mtp_loss_coefficient": 0.5,
}
TIED: Settings = {"model.tie_embeddings": True}
INTERLEAVED: Settings = {"parallel.pp.schedule": "interleaved"}
UNEVEN: Settings = {"parallel.pp.split": [6, 1]}
WIDE = pytest.mark.wide("layouts")
CASES = [
    ("pp2", INTERLEAVED),
    ("pp2", UNEVEN),
    *(pytest.param(f"pp2{data}2", split, marks=WIDE) for data in ("zero", "fsdp") for split in (INTERLEAVED, UNEVEN)),
]


@cache
def alone(tied: bool) -> Trace:
    return train_steps({**LLAMA, **TIED} if tied else LLAMA)


@pytest.mark.parametrize(("layout", "split"), CASES)
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=WIDE)], ids=["tied", "not tied"])
def test_gradients_of_shared_parameters_are_those_of_one_process(layout: str, split: Settings, tied: bool) -> None:
    size = 2 if layout == "pp2" else 4
    model = {**LLAMA, **(TIED if tied else {})}
    found = train_ranks(size, {**model, **split, "parallel.layout": layout})
    assert difference(found, alone(tied)) == ""
