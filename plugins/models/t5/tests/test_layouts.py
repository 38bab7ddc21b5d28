"""T5 computes the same under every layout: losses, gradients, norms and weights are those of one process.

Encoder and decoder have different lengths, and every stage of the decoder reads the encoder's output.
"""

from typing import Any

import pytest

from mplug import UsageError
from mplug.commands import build_model
from mplug_testing.harness import tiny_run
from mplug_testing.parity import require_parity

SPANS: dict[str, Any] = {
    "data.name": "spans",
    "data.of": {"name": "mock", "vocab_size": 200},
    "data.sentinels": 8,
    "data.end_token": 1,
    "data.encoder_length": 23,
    "data.noise_density": 0.3,
    "data.mean_span": 2.0,
}
SHAPE = {
    "model.name": "t5",
    "model.num_layers": 2,
    "model.num_decoder_layers": 3,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.head_dim": 8,
    "model.ffn_hidden_size": 48,
    "model.vocab_size": 209,
    "model.bias_ranges": 8,
    "model.bias_reach": 10,
    "model.encoder_length": 23,
}
V1_1 = {**SHAPE, **SPANS}
FIRST = {**V1_1, "model.tie_embeddings": True, "model.activation": "relu", "model.dropout": 0.1}
LORA = {"adapters.lora.rank": 3, "adapters.lora.alpha": 6.0}
WIDE = pytest.mark.wide("layouts")
CP = "cp2 parallel.cp.method=ulysses"
UNEVEN = "pp2 parallel.pp.split=[3,9]"
CASES = [
    pytest.param(UNEVEN, FIRST, id="pp2 uneven first"),
    pytest.param(CP, FIRST, id="cp2 first"),
    *(
        pytest.param(layout, settings, id=f"{layout} {name}", marks=WIDE)
        for name, settings in {"v1.1": V1_1, "first": FIRST}.items()
        for layout in (
            "tp2",
            "tp2 parallel.tp.sequence_parallel=false",
            UNEVEN,
            "pp2 parallel.pp.split=[7,5]",
            "zero2",
            "fsdp2",
            "dp2",
            CP,
            "tp2pp2",
            "fsdp2tp2",
            "tp2cp2 parallel.cp.method=ulysses",
        )
        if (layout, name) not in ((CP, "first"), (UNEVEN, "first"))
    ),
    *(
        pytest.param(layout, {**settings, **LORA}, id=f"{layout} {name} lora", marks=WIDE)
        for name, settings in {"v1.1": V1_1, "first": FIRST}.items()
        for layout in ("tp2", "fsdp2", UNEVEN, "zero2")
    ),
]


@pytest.mark.wide("families")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(("layout", "settings"), CASES)
def test_a_layout_computes_what_one_process_does(layout: str, settings: dict[str, Any]) -> None:
    require_parity(settings, layout)


@pytest.mark.parametrize(
    "layout", [{"parallel.layout": "cp2"}, {"parallel.layout": "pp2cp2", "parallel.pp.split": [3, 9]}]
)
def test_attention_by_parts_is_refused_before_launch(layout: dict[str, Any]) -> None:
    """Of the pipeline, the first stage has the encoder alone, which computes whole rows."""
    with pytest.raises(UsageError, match=r"does not support relative bias; set parallel\.cp\.method=ulysses"):
        build_model(tiny_run({**V1_1, **layout}))
