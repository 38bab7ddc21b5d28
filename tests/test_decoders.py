"""Families over the shared decoder: what the page says of them is true, and blocks describe their own parameters."""

import re
import sys
from dataclasses import fields
from inspect import Parameter as Argument
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from pydantic import Field
from torch import nn

from mplug import Buffer, Init, Model, Parameter, Segment, Window
from mplug.model.units import run_units
from mplug_nn import (
    MLP,
    Attention,
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    DenseBlock,
    Embedding,
    Entries,
    ExpertsConfig,
    Gating,
    Inits,
    Linear,
    MixtureOfExperts,
    MLPConfig,
    Norm,
    NormConfig,
    Router,
    build_decoder,
    describe,
    written_config,
)
from mplug_nn.specification import AttentionSpec, Weighting
from mplug_testing.published import require_tables

PAGE = Path(__file__).parent.parent / "docs" / "writing-a-model.md"
INITS = Inits(Init("normal", std=2.0), Init("normal", std=1.0))
SMALL: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 11}


def shown(name: str, **given: Any) -> dict[str, Any]:
    """What a block of code of the page defines, with names of earlier blocks."""
    found = re.search(rf"<!-- {name} -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    module = ModuleType(f"shown_{name}")
    vars(module).update(given)
    sys.modules[module.__name__] = module  # dataclasses and pydantic look annotations up there
    try:
        exec(found[1], vars(module))
    finally:
        del sys.modules[module.__name__]
    return vars(module)


def on_meta(config: DecoderConfig) -> Model:
    with torch.device("meta"):
        return build_decoder(config)


class Same(DecoderConfig):
    """Equal blocks, except for the width of one MLP."""

    wide: int | None = Field(None, description="number of the block whose MLP has width 8 instead of 6")

    def block_config(self, number: int) -> BlockConfig:
        return BlockConfig(self.norm_config(), self.attention_config(), MLPConfig(8 if number == self.wide else 6))


def test_the_family_of_the_page_has_the_blocks_that_the_page_says() -> None:
    family = shown("family")["Ripple"]
    model = family(family.Config(num_layers=3, **SMALL, ffn_hidden_size=6, window=5)).build_model()
    blocks = [model.module.get_submodule(f"blocks.{number}") for number in range(3)]
    assert [block.attn.spec.window for block in blocks] == [5, None, 5]
    assert [[name for name in ("mlp", "moe") if hasattr(block, name)] for block in blocks] == [
        ["mlp"],
        ["moe"],
        ["moe"],
    ]
    attention, mlp, experts = 4 * 8 * 8, 3 * 6 * 8, 4 * 8 + 2 * 3 * 6 * 8
    assert model.plan.flops.per_token == 6 * (3 * attention + mlp + 2 * experts + 8 * 11)
    assert model.plan.flops.per_squared_length == 6 * 8
    assert dict(model.plan.flops.windows) == {Window(5, causal=True): 2 * 12 * 8}
    names = dict(model.module.named_parameters())
    assert model.plan.match(names)["blocks.1.moe.experts.up"].dims[0] == "expert"
    assert "blocks.*.moe.experts.up" in model.plan.parameters


def test_the_form_of_the_page_reads_and_writes_the_family_of_the_page() -> None:
    ripple = shown("family")["RippleConfig"]
    plugin = shown("form", RippleConfig=ripple)["PublishedRipple"]
    require_tables(plugin)
    assert written_config(plugin, ripple(window=64, num_layers=3))["sliding_window"] == 64
    with pytest.raises(ValueError, match=r"cannot express model\.qk_norm=True"):
        written_config(plugin, ripple(qk_norm=True))
    with pytest.raises(ValueError, match=r"Ripple does not scale rotary positions"):
        plugin.public_forms[0].read({"model_type": "ripple", "rope_scaling": {"type": "yarn"}})


def test_the_part_of_the_page_computes_and_describes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    part = ModuleType("acme_ripple.scaled")
    vars(part).update(shown("part"))
    monkeypatch.setitem(sys.modules, "acme_ripple.scaled", part)
    own = shown("config")["ScaledMLPConfig"]

    class Config(DecoderConfig):
        def block_config(self, number: int) -> BlockConfig:
            return BlockConfig(self.norm_config(), self.attention_config(), own(6))

    model = on_meta(Config(num_layers=2, **SMALL))
    assert model.plan.parameters["blocks.*.mlp.gain"] == Parameter(("embed",), Init("constant", value=0.1))
    assert model.plan.parameters["blocks.*.mlp.mlp.up.weight"].init.std == 0.02
    whole = model.module.to_empty(device="cpu")
    for parameter in whole.parameters():
        nn.init.constant_(parameter, 0.1)
    tokens, positions = torch.arange(8).view(2, 4), torch.arange(4)[None]
    given = {"tokens": tokens, "positions": positions, "keys": torch.zeros(2, dtype=torch.int64)}
    logits = run_units(whole, model.plan.inference, given)["logits"]
    assert logits.shape == (2, 4, 11)
    assert logits.isfinite().all()


def arguments_of(module: type) -> dict[str, Argument]:
    """The arguments of a module; those of its attention's specification have the defaults of that class."""
    named, of_specification = dict(signature(module).parameters), signature(AttentionSpec).parameters
    if named.pop("weighting", None) is not None:
        named |= {name: of_specification[name] for name in Weighting.__annotations__}
    return named


@pytest.mark.parametrize(
    ("config", "modules"),
    [
        (NormConfig, (Norm,)),
        (AttentionConfig, (Attention,)),
        (MLPConfig, (MLP,)),
        (ExpertsConfig, (Gating, Router, MixtureOfExperts)),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_part_has_the_arguments_of_its_modules_and_their_defaults(config: type, modules: tuple[type, ...]) -> None:
    arguments = {name: one for module in modules for name, one in arguments_of(module).items()}
    own = signature(config).parameters
    assert set(own) == set(arguments) - {"dim", "router", "gating"}
    for name, one in own.items():
        if arguments[name].default is not Argument.empty:
            assert one.default == arguments[name].default, name
    assert all(field.name in own for field in fields(config))


def test_positions_that_are_not_rotary_take_heads_of_any_width() -> None:
    class Unrotated(Same):
        @property
        def has_rotary_positions(self) -> bool:
            return False

    odd = {"head_dim": 3, "hidden_size": 8}
    with pytest.raises(ValueError, match="even head_dim, not 3"):
        Same(**odd)
    assert Unrotated(**odd).attention_config().theta is None


# Descriptions.


class Gained(nn.Module):
    """A linear layer without a description of its own, and a gain."""

    def __init__(self, described: Entries) -> None:
        super().__init__()
        self.linear = Linear(4, 4, bias=False)
        self.norm = Norm(4, "rmsnorm")
        self.described = described

    def plan_entries(self, inits: Inits) -> Entries:
        assert inits is INITS
        return self.described


LINEAR = Parameter(("mlp", "embed"), INITS.weight)


def test_the_outer_block_decides_what_an_inner_module_means() -> None:
    inner = Parameter(("latent",), Init("constant", value=0.0))
    described = describe(Gained({"linear.weight": LINEAR, "norm.weight": inner}), INITS)
    assert described.parameters == {"linear.weight": LINEAR, "norm.weight": inner}
    assert described.flops.per_token == 6 * 16


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({}, "no building block describes the parameter 'linear.weight'; declare it where Linear creates it"),
        ({"linear.weight": Buffer(("embed",))}, "no building block describes the parameter 'linear.weight'"),
        (
            {"linear.weight": LINEAR, "gain": LINEAR},
            "Gained.plan_entries describes 'gain', but the module has no parameter or buffer 'gain'",
        ),
    ],
    ids=["nothing", "a buffer", "too much"],
)
def test_what_no_block_describes_and_what_no_block_has_are_errors(entries: Entries, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        describe(Gained(entries), INITS)


def test_names_that_differ_in_numbers_are_one_pattern_only_if_they_mean_the_same() -> None:
    same = on_meta(Same(num_layers=3, **SMALL)).plan.parameters
    assert {name for name in same if "mlp" in name} == {"blocks.*.mlp.up.weight", "blocks.*.mlp.down.weight"}
    model = on_meta(Same(num_layers=3, wide=1, **SMALL))
    widths = {name: one.dims[1] for name, one in model.plan.parameters.items() if "mlp.down" in name}
    assert widths == {f"blocks.{n}.mlp.down.weight": Segment("mlp", 8 if n == 1 else 6) for n in range(3)}
    assert "blocks.*.attn.out.weight" in model.plan.parameters
    model.plan.match(dict(model.module.named_parameters()))


def test_patterns_cover_names_that_mean_the_same_and_tied_parameters_once() -> None:
    tables = nn.ModuleDict({"0": Embedding(3, 4), "1": Embedding(3, 4), "last": Embedding(5, 4)})
    described = describe(tables, INITS).parameters
    assert set(described) == {"0.weight", "1.weight", "last.weight"}
    tables = nn.ModuleDict({"first": Embedding(3, 4), "second": Embedding(3, 4)})
    tables["second"].weight = tables["first"].weight
    described = describe(tables, INITS)
    assert described.tied == (("first.weight", "second.weight"),)
    assert list(described.parameters) == ["first.weight"]


def test_a_decoder_takes_documents_only_if_all_of_its_blocks_do() -> None:
    class Scan(nn.Module):
        def forward(self, x: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            return x

    class ScanConfig:
        def build(self, hidden_size: int) -> nn.Module:
            return Scan()

    class Mixed(Same):
        def block_config(self, number: int) -> Any:
            return ScanConfig() if number else super().block_config(number)

    whole, mixed = (on_meta(kind(num_layers=2, **SMALL)).plan for kind in (Same, Mixed))
    assert [unit.optional for unit in whole.units[1:-1]] == [("document_lengths",)] * 2
    assert [unit.optional for unit in mixed.units[1:-1]] == [(), ()]
    assert [("document_lengths" in plan.context) for plan in (whole, mixed)] == [True, False]


def test_a_block_whose_feed_forward_takes_no_document_lengths_is_refused_by_name() -> None:
    with pytest.raises(
        TypeError, match=r"Old.feed_forward must take \(self, x, positions, keys, document_lengths\): too"
    ):

        class Old(DenseBlock):
            def feed_forward(self, x: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                return x
