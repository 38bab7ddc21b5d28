"""Encoders compute the same under every layout: losses, gradients, norms and weights are those of one process.

The data are masked, so micro batches have different numbers of targets. Embeddings are tied: both ends of a pipeline
have the table.
"""

from typing import Any

import pytest

from mplug_testing.parity import require_parity

MASKED: dict[str, Any] = {
    "data.name": "masked",
    "data.of": {"name": "mock", "vocab_size": 255},
    "data.mask_token": 256,
    "data.rate": 0.3,
}
PACKED = {"data.of": {"name": "mock", "vocab_size": 255, "documents": 3}}
SHAPE = {"model.num_layers": 3, "model.ffn_hidden_size": 48, "model.vocab_size": 257}
SHAPE |= {"model.hidden_size": 32, "model.num_attention_heads": 4}
BERT = {"model.name": "bert", **SHAPE, "model.max_position_embeddings": 20, "model.position_offset": 2, **MASKED}
MODERN = {"model.name": "modernbert", **SHAPE, "model.num_layers": 4, "model.window": 3, **MASKED}
LORA = {"adapters.lora.rank": 3, "adapters.lora.alpha": 6.0}
WIDE = pytest.mark.wide("layouts")
CP = "cp2 parallel.cp.method="
CASES = [
    pytest.param("tp2pp2", {**BERT, "model.dropout": 0.1}, id="tp2pp2 bert"),
    pytest.param(f"{CP}ring", {**MODERN, **PACKED}, id="cp2 ring modernbert packed"),
    *(
        pytest.param(layout, settings, id=f"{layout} {name}", marks=WIDE)
        for name, settings in {
            "bert": BERT,
            "bert packed": {**BERT, **PACKED},
            "modernbert": MODERN,
            "modernbert packed": {**MODERN, **PACKED},
        }.items()
        for layout in (
            "tp2",
            f"pp2 parallel.pp.split=[{settings['model.num_layers']},2]",
            "zero2",
            "fsdp2",
            "dp2",
            f"{CP}ulysses",
            "tp2pp2",
            "fsdp2tp2",
        )
        if (layout, name) != ("tp2pp2", "bert")
    ),
    *(
        pytest.param(f"{CP}{method}", settings, id=f"cp2 {method} {name}", marks=WIDE)
        for method in ("ring", "all_gather")
        for name, settings in {"bert": BERT, "bert packed": {**BERT, **PACKED}, "modernbert": MODERN}.items()
    ),
    pytest.param("cp4", {**MODERN, **PACKED}, id="cp4 modernbert packed", marks=WIDE),
    pytest.param("cp2tp2", MODERN, id="cp2tp2 modernbert", marks=WIDE),
    pytest.param("cp2pp2 parallel.pp.split=[4,2]", {**MODERN, **PACKED}, id="cp2pp2 modernbert packed", marks=WIDE),
    pytest.param("tp2cp2", BERT, id="tp2cp2 bert", marks=WIDE),
    *(
        pytest.param(layout, {**settings, **LORA}, id=f"{layout} {name} lora", marks=WIDE)
        for name, settings in {"bert": BERT, "modernbert packed": {**MODERN, **PACKED}}.items()
        for layout in ("tp2", "fsdp2", "pp2", "zero2")
    ),
]


@pytest.mark.wide("families")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(("layout", "settings"), CASES)
def test_a_layout_computes_what_one_process_does(layout: str, settings: dict[str, Any]) -> None:
    require_parity(settings, layout)
