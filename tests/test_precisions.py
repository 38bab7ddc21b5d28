"""Precisions are plugins: found by name, checked, recorded; and a recipe reaches every product outside of base modules.

The precisions of the third-party package nova-tinto have nothing in common with the host's.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import mplug
from mplug.cli import main
from mplug.errors import UsageError
from mplug.layout.plan import Plan, Unit
from mplug.layout.work import Flops
from mplug.model.build import build_model
from mplug.precisions.dtypes import FORMATS
from mplug.precisions.precision import Precision, Recipe, rounding_of_sums
from mplug.registry.entry_points import BrokenPlugin, Registry
from mplug.training.assembly import build
from mplug_products.recipe import default_base_modules
from mplug_testing import PrecisionSuite
from mplug_testing.harness import tiny_config, tiny_run, train_steps
from mplug_testing.runs import trained

Plant = Callable[..., None]
TINTO: dict[str, Any] = {"trainer.precision": "tinto", "kernels.linear": "press"}


# The contract.


class TestBF16(PrecisionSuite):
    plugin = "bf16"


@pytest.mark.wide("precision")
class TestFP32(PrecisionSuite):
    plugin = "fp32"


class TestFP16(TestFP32):
    plugin = "fp16"


class TestFP64(TestFP32):
    plugin = "fp64"


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"weights": "bfloat61"}, "weights='bfloat61' is not a floating-point format; did you mean 'bfloat16'?"),
        ({"weights": "int8"}, "weights='int8' is not a floating-point format"),
        ({"weights": "float8_e4m3fn", "activations": "float8_e4m3fn"}, "has no arithmetic in torch"),
        ({"activations": "bfloat16"}, "activations='bfloat16' differ from weights='float32'"),
        ({"masters": "bfloat16"}, "masters='bfloat16' do not hold every number of float32"),
        ({"weights": "float64", "activations": "float64"}, "masters='float32' do not hold every number of float64"),
        ({"gradients": "float16"}, "gradients='float16' is neither weights='float32' nor masters='float32'"),
        ({"loss_scaling": "static"}, "loss_scaling='static' is not one of 'none' and 'dynamic'"),
        ({"recipe": {"bits": 8}}, "is not a mplug.Recipe with a name"),
        ({"base_modules": ("head",)}, "it names base_modules and has no recipe"),
    ],
)
def test_every_format_that_does_not_fit_is_a_fault(fields: dict[str, Any], fault: str) -> None:
    faults = list(Precision(**{"weights": "float32", "activations": "float32", **fields}).faults())
    assert [found for found in faults if fault in found], faults


def test_the_bits_of_the_formats_are_those_of_torch() -> None:
    for name, known in FORMATS.items():
        dtype = getattr(torch, name)
        assert (known.bytes, known.is_floating) == (dtype.itemsize, dtype.is_floating_point)
        if known.is_floating:
            step = 2.0 ** (1 - known.significand)  # torch.finfo states another one for float8_e5m2fnuz
            numbers = torch.tensor([1 + step, 1 + step / 2], dtype=torch.float64)
            assert numbers.to(dtype).double().tolist() == [1 + step, 1.0], name


def test_sums_in_a_format_round_as_its_significand_says() -> None:
    bounds = {"fp64": None, "fp32": None, "fp16": 2.0**-9, "bf16": 2.0**-6}
    assert {word: rounding_of_sums(word) for word in bounds} == bounds


# Names.


def refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_model(tiny_run(settings))
    assert words in str(caught.value)


def test_a_precision_is_found_by_name_and_two_owners_of_a_name_are_both_named(plant: Plant) -> None:
    plant("acme-tints")
    refused(
        {"trainer.precision": "bf16"},
        "'bf16' is claimed by acme-tints 1.0.0 and mplug 0.1.0; use 'acme-tints/bf16' or 'mplug/bf16'",
    )
    for owner, masters in (("acme-tints", "float64"), ("mplug", "float32")):
        assert tiny_run({"trainer.precision": f"{owner}/bf16"}).precision.masters == masters


def test_installing_a_precision_changes_nothing_and_its_options_are_bound_only_by_its_name(plant: Plant) -> None:
    before = tiny_config({}).resolved()
    plant("nova-tinto")
    assert tiny_config({}).resolved() == before
    config = tiny_config({**TINTO, "precisions.tinto.bits": 8}).resolved()
    assert config["precisions"] == {"tinto": {"bits": 8}}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('gradients="float64")', 'gradients="float64").masters', "the answer is a mplug.Precision"),
        ('masters="float64"', 'masters="float46"', "masters='float46' is not a floating-point format"),
        (
            'def define_precision(self) -> Precision:\n        """The masters',
            'def formats(self):\n        """',
            "it does not implement the hook 'define_precision'",
        ),
        ('"""The masters are wider than fp32."""', "raise KeyError('masters')", "fails in 'define_precision'"),
    ],
    ids=["another type", "an unknown format", "no hook", "an exception"],
)
def test_a_breach_of_the_contract_is_refused_and_names_the_plugin(plant: Plant, old: str, new: str, said: str) -> None:
    plant("nova-tinto", old, new)
    with pytest.raises(BrokenPlugin, match=f"precisions/patient.*{said}"):
        tiny_run({"trainer.precision": "patient"})


# The recipe.


def test_a_recipe_applies_to_all_products_but_those_of_base_modules(plant: Plant) -> None:
    plant("nova-tinto")
    need = Recipe("operands of few bits").need
    model = build_model(tiny_run(TINTO))
    assert model.base_modules == ("embedding", "blocks.0", "blocks.3", "head")
    found = {filled.site.name for filled in model.slots if filled.supplier == "kernels/press"}
    parts = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
    assert found == {f"blocks.{block}.{part}" for block in (1, 2) for part in parts}
    assert found == {one.site.name for one in model.slots if need in one.site.needs and one.site.slot == "Linear.gemm"}
    chosen = build_model(tiny_run({**TINTO, "trainer.base_modules": ["blocks.*.mlp", "blocks.3", "head"]}))
    assert {one.site.name for one in chosen.slots if one.supplier == "kernels/press"} == {
        f"blocks.{block}.attn.{part}" for block in (0, 1, 2) for part in ("qkv", "out")
    }


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"precisions.tinto.bits": 99}, "precisions.tinto.bits"),
        (
            {"precisions.tinot.bits": 9},
            "precisions.tinot (the suite's settings): unknown field or plugin; did you mean",
        ),
        ({"trainer.base_modules": ["head"], "trainer.precision": "bf16"}, "has no recipe for matrix products"),
        ({"kernels.linear": None}, "plain torch cannot serve Linear.gemm of 'blocks.*.attn.qkv': it does not offer"),
        ({"trainer.base_modules": ["blcoks.1"]}, "matches no module of the model; did you mean 'blocks.1'?"),
        ({"model.num_layers": 2}, "would compute nothing by its recipe 'operands of few bits'"),
        ({"model.name": "mixtral", "model.num_experts": 4}, "plain torch cannot serve Experts.product of"),
    ],
)
def test_settings_of_a_recipe_that_cannot_be_followed_are_refused(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], said: str
) -> None:
    plant("nova-tinto")
    monkeypatch.setattr("mplug_estimates.unmet.kernels_that_would_do", lambda *_: "")  # a process per installed kernel
    refused({**TINTO, **settings}, said)


def test_a_stage_whose_products_are_all_base_modules_needs_no_kernel(plant: Plant) -> None:
    plant("nova-tinto")
    settings = {**TINTO, "model.num_layers": 3, "parallel.layout": "pp2"}
    for rank, number in ((0, 4), (1, 0)):
        run = tiny_run(settings)
        run.rank = rank
        filled = [one for one in build_model(run).slots if one.supplier == "kernels/press"]
        assert len(filled) == number


def test_a_supplier_of_the_wider_slot_that_does_not_declare_the_recipe_is_refused(plant: Plant) -> None:
    plant("nova-tinto")
    run = tiny_run(TINTO)
    model = build_model(run)
    site = next(one.site for one in model.slots if one.site.slot == "MLP.core" and one.site.name == "blocks.1.mlp")
    careless = mplug.Offer({"MLP.core": lambda *_: None}, lambda *_: True, plugin="kernels/careless")
    assert str(careless.answer(site, run)).startswith("it does not offer recipe")


def test_base_modules_of_a_plan_are_the_ends_of_every_row_of_units() -> None:
    names = ("vision", *(f"encoder.{n}" for n in range(3)), *(f"decoder.{n}" for n in range(4)), "head")
    units = tuple(Unit(name, ("x",), ("x",)) for name in names)
    plan = Plan(units, {}, {}, {}, Flops(0, 0), base_modules=("decoder.*.gate",))
    ends = ("vision", "encoder.0", "encoder.2", "decoder.0", "decoder.3", "head", "decoder.*.gate")
    assert default_base_modules(plan) == ends


def test_explain_shows_which_module_computes_in_which_format(plant: Plant) -> None:
    plant("nova-tinto")
    words = ["explain", "--preset", "nano", "--precision", "tinto", "--kernels", "linear=press"]
    shown = CliRunner().invoke(main, words, catch_exceptions=False)
    lines = [line.split() for line in shown.output.splitlines()]
    assert ["float32", "float32", "float32", "float32", "none"] in lines
    assert "products by the recipe 'operands of few bits' (bits=11), except in base modules" in shown.output
    products = [line for line in lines if line[:1] == ["blocks.*.mlp.up"] and "Linear.gemm" in line]
    assert products[:2] == [
        ["blocks.*.mlp.up", "2", "Linear.gemm", "float32"],
        ["blocks.*.mlp.up", "2", "Linear.gemm", "recipe", "'operands", "of", "few", "bits'"],
    ]


# Training, saving and resuming.


def test_wide_masters_learn_what_fp32_masters_round_away(plant: Plant) -> None:
    plant("nova-tinto")
    parts = build(tiny_run({"trainer.precision": "patient"}))
    assert {piece.master.dtype for piece in parts.pieces} == {torch.float64}
    assert {piece.weight is not None and piece.weight.dtype for piece in parts.pieces} == {torch.float32}
    assert {sink.buffer.dtype for sink in parts.model.sinks.values()} == {torch.float64}
    assert train_steps({"trainer.precision": "patient"}).losses != train_steps({"trainer.precision": "fp32"}).losses


def test_a_run_records_its_precision_and_resumes_only_in_the_same_one(plant: Plant, tmp_path: Path) -> None:
    plant("nova-tinto")
    settings = {"trainer.steps": 2, "trainer.eval_every": 0, "schedule.warmup_steps": 1, "checkpoint.every": 1}
    first = trained(tiny_config({**settings, **TINTO}), tmp_path)
    manifest = json.loads((first.saved[-1] / "checkpoint.json").read_text())
    plugins = {plugin["plugin"]: plugin["distribution"] for plugin in manifest["provenance"]["plugins"]}
    assert plugins["precisions/tinto"] == "nova-tinto"
    plant("acme-tints")  # a second owner of the name
    same = {**settings, **TINTO, "trainer.steps": 3, "trainer.precision": "nova-tinto/tinto"}
    for changes, said in (
        ({"trainer.precision": "fp32", "kernels.linear": None}, "trainer.precision: tinto -> fp32"),
        ({"precisions.tinto.bits": 8}, "precisions.tinto.bits: 11 -> 8"),
        ({"trainer.base_modules": ["blocks.3"]}, "trainer.base_modules: null -> ['blocks.3']"),
        (
            {"trainer.precision": "acme-tints/tinto", "kernels.linear": None},
            "trainer.precision: tinto of nova-tinto -> acme-tints/tinto",
        ),
    ):
        with pytest.raises(UsageError, match=re.escape(said)):
            trained(tiny_config({**same, **changes}), tmp_path / "again", resume_from=first.saved[-1])
    assert trained(tiny_config(same), tmp_path / "same", resume_from=first.saved[-1]).saved


def test_the_hosts_own_precisions_belong_to_its_version() -> None:
    entries = {entry.name: entry for entry in Registry().entries("precisions") if entry.distribution == "mplug"}
    assert set(entries) == {"fp32", "bf16", "fp16", "fp64"}
    assert {entry.requires for entry in entries.values()} == {"==0.1.0"}
