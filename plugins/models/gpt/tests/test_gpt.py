"""GPT keeps the contract of models, and its loss and gradients are those of the papers' formulas."""

import math
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mplug_gpt import GPT
from papers import Weights, affine, decode, gated
from torch import Tensor

from mplug import Model, UsageError
from mplug_testing import ModelSuite, ParallelSuite

DENSE = ("cp2", "dp2", "fsdp2", "pp2", "tp2", "zero2")
"""Strategies that do not divide experts; `fsdp` refuses to run beside `zero`."""
PAIRS = [f"{one}{other}" for one, other in combinations(DENSE, 2) if (one, other) != ("fsdp2", "zero2")]


def feed_forward(x: Tensor, w: Weights, name: str, c: Any) -> Tensor:
    """GELU (arXiv 1606.08415) or SwiGLU (arXiv 2002.05202)."""
    h = affine(x, w, f"{name}.up")
    if c.activation == "swiglu":
        h = gated(h)
    elif c.activation == "gelu":
        h = h * (1 + torch.erf(h / math.sqrt(2))) / 2
    else:
        h = h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))) / 2
    return affine(h, w, f"{name}.down")


@pytest.mark.wide(
    "layouts",
    tests=["test_a_layout_gives_the_run_of_one_process"],
    quick=["cp2dp2", "one_rank", "pp2tp2"],
)
class TestGPT(ModelSuite):
    """Under every second pair that does not divide experts; the wide set has all of them."""

    plugin = "gpt"
    settings = {"model.dropout": 0.1}
    layouts = ("", *PAIRS[::2])
    positions = "relative"
    beside = {"max_position_embeddings": {"model.position": "learned"}}

    @pytest.mark.wide("families")
    def test_replayed_steps_are_steps(self) -> None:
        """Those of `TestGPTWithEverything` are replayed in the quick tests."""
        super().test_replayed_steps_are_steps()

    def reference(self, weights: Any, batch: Any, config: Any) -> Tensor:
        def of_block(h: Tensor, n: int) -> Tensor:
            return feed_forward(h, weights, f"blocks.{n}.mlp", config)

        return decode(weights, config, batch["tokens"], batch["positions"], of_block)


class TestGPTWithEverything(TestGPT):
    checks_fields = False
    positions = "absolute"
    settings = ParallelSuite.variants["another-model"]
    layouts = ("pp2tp2", "tp2 parallel.tp.sequence_parallel=false")
    test_replayed_steps_are_steps = ModelSuite.test_replayed_steps_are_steps


# Every shape computes what the papers say.

LEARNED = {"position": "learned", "max_position_embeddings": 16}
HEADS: list[dict[str, Any]] = [{"num_kv_heads": None}, {"num_kv_heads": 2, "head_dim": 6}, {"num_kv_heads": 1}]
CHOICES: list[list[dict[str, Any]]] = [
    [LEARNED, {"position": "rotary", "rope_theta": 100.0}],
    HEADS,
    [{"qk_norm": False}, {"qk_norm": True}],
    [{"activation": name, "ffn_hidden_size": 20} for name in ("gelu", "gelu_tanh", "swiglu")],
    [{"norm": "layernorm", "norm_eps": 1e-3}, {"norm": "rmsnorm"}],
    [{"tie_embeddings": False}, {"tie_embeddings": True}],
    [{"bias": False}, {"bias": True}],
]
SHAPES = [{name: value for choice in chosen for name, value in choice.items()} for chosen in product(*CHOICES)]
SHAPES += [{**heads, "position": "alibi"} for heads in HEADS]


def with_every_pair(shapes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Few of the shapes: every two choices that any shape has together are together in one of these."""
    pairs = [set(combinations(sorted(f"{name}={value}" for name, value in one.items()), 2)) for one in shapes]
    chosen, missing = list[int](), set().union(*pairs)
    while missing:
        chosen.append(max(range(len(shapes)), key=lambda n: len(pairs[n] & missing)))
        missing -= pairs[chosen[-1]]
    return [shapes[n] for n in chosen]


QUICK = with_every_pair(SHAPES)
"""The shapes of the quick tests; `pytest --wide layouts` tries the whole product."""
PRODUCT = [shape if shape in QUICK else pytest.param(shape, marks=pytest.mark.wide("layouts")) for shape in SHAPES]


@pytest.mark.parametrize("shape", PRODUCT, ids=lambda shape: "-".join(map(str, shape.values())))
def test_logits_and_all_gradients_are_those_of_the_papers(shape: dict[str, Any]) -> None:
    settings = {f"model.{name}": value for name, value in {"num_layers": 2, **shape}.items()}
    type("Shape", (TestGPT,), {"settings": settings})().test_it_computes_what_its_reference_computes()


def test_projections_into_the_residual_stream_begin_smaller_by_the_root_of_their_number() -> None:
    model = TestGPT().trial(model__hidden_size=128, model__num_layers=8, model__init_std=0.1).model
    spread = {name: float(p.detach().std()) for name, p in model.parameters().items() if p.dim() == 2}
    for name, found in spread.items():
        residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
        assert found == pytest.approx(0.1 / 4 if residual else 0.1, rel=0.08), name  # 2 x 8 additions
    ones = [p for p in model.parameters().values() if p.dim() == 1]
    assert ones
    assert all(bool((p == 1).all()) for p in ones)


# Sizes.


def on_meta(**shape: Any) -> Model:
    with torch.device("meta"):
        return GPT(GPT.Config(**shape)).build_model()


def numel(preset: str) -> int:
    return sum(parameter.numel() for parameter in on_meta(**GPT.presets[preset]["model"]).module.parameters())


@pytest.mark.parametrize("name", sorted(set(GPT.presets) - {"nano"}))
def test_a_preset_has_the_number_of_parameters_that_its_name_states(name: str) -> None:
    digits, unit = float(name[:-1]), {"m": 1e6, "b": 1e9}[name[-1]]
    last_digit = 0.1 if "." in name else 1.0  # 1.7b may be anything that rounds to 1.7
    assert numel(name) == pytest.approx(digits * unit, abs=max(0.02 * digits, last_digit / 2) * unit)


def test_gpt2_and_gpt3_have_their_published_number_of_parameters() -> None:
    assert numel("125m") == 124_439_808  # the released 124M model
    assert numel("175b") == pytest.approx(175.0e9, rel=0.005)


@pytest.mark.parametrize(
    ("activation", "hidden_size", "width"),
    [
        ("gelu", 16, 64),
        ("gelu_tanh", 16, 64),
        ("swiglu", 16, 64),  # 8/3 of 16 is 42.7
        ("swiglu", 96, 256),  # exactly
        ("swiglu", 104, 320),  # 277.3
    ],
)
def test_the_default_width_of_the_feed_forward_part(activation: str, hidden_size: int, width: int) -> None:
    model = on_meta(num_layers=1, num_attention_heads=4, activation=activation, hidden_size=hidden_size)
    assert tuple(model.parameters()["blocks.0.mlp.down.weight"].shape) == (hidden_size, width)


# Refusals.


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hidden_size": 18}, "num_attention_heads=4 does not divide hidden_size=18"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 does not divide num_attention_heads=4"),
        ({"head_dim": 5, "position": "rotary"}, "even head_dim, not 5"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_the_numbers(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        GPT.Config(**{"num_attention_heads": 4, **fields})


def test_a_sequence_longer_than_the_learned_positions_is_refused() -> None:
    config: Any = SimpleNamespace(trainer=SimpleNamespace(seq_length=17))
    with pytest.raises(UsageError, match=r"seq_length=17.*max_position_embeddings=16"):
        GPT(GPT.Config(**LEARNED)).configure(config)
    GPT(GPT.Config(**{**LEARNED, "position": "rotary"})).configure(config)
