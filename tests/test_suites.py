"""The suites of `mplug_testing`: sound packages of third parties pass them, and they catch what authors get wrong.

A file of `suite_faults` has the faults of one package: `Suite.test[arguments]`, then each fault by its name with the
sound text, what the author writes instead (`old => new`, or two items), and words of the failure, divided by ` ... `.
The first fault of a test is planted by the quick tests, the others by the wide set `suites`.
"""

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import SkipTest

import pytest
import torch
import yaml
from mplug_lora import LoRA
from one_pass import ONE_PASS
from torch import Tensor

from mplug import UsageError
from mplug.model.build import build_model
from mplug.training.assembly import build
from mplug_nn import operator, router, statistics
from mplug_testing import (
    AdapterSuite,
    CommandSuite,
    DataSuite,
    ExtensionSuite,
    Fault,
    FormatSuite,
    KernelSuite,
    ModelSuite,
    OptimizerSuite,
    ParallelSuite,
    PrecisionSuite,
    TokenizerSuite,
)
from mplug_testing.derivatives import auxiliary_losses
from mplug_testing.grouped import WEIGHTS
from mplug_testing.harness import tiny_run
from mplug_testing.kernel_buffer_checks import BufferTrial
from mplug_testing.values import other_values

Plant = Callable[..., None]
HERE = Path(__file__).parent
THIRD_PARTY = HERE / "third_party"


def suite(base: type, plugin: str, **fields: Any) -> type:
    """A suite as an author writes it."""
    return type("Planted", (base,), {"plugin": plugin, **fields})


def own_suite(name: str) -> Any:
    """The suite of the package `nova-<name>` in the package's own tests; its plugin must be planted."""
    module = runpy.run_path(str(THIRD_PARTY / f"nova-{name}" / "tests" / f"test_{name}.py"))
    return module[f"Test{name.capitalize()}"]()


def file_of(package: str, name: str) -> str:
    return str(THIRD_PARTY / package / "tests" / name)


NOTES = {"data.path": file_of("nova-jotter", "notes.jsonl")}
TABLE = {"data.path": file_of("nova-table", "notes.csv")}
WORDS = {"path": file_of("nova-glyph", "words.txt")}
ATTENTION = {"adapters.lora.targets": ["attention"]}
Plotter = suite(ExtensionSuite, "plotter", settings={"extensions.plotter.every": 2}, files=("loss.svg",))
Ulysses = suite(ParallelSuite, "ulys", refused={"ulys8": ("ulys=8", "4 query heads")})
Coarse = suite(KernelSuite, "delayed", settings={"kernels.delayed.bits": 6})  # its scale shows in every result
OfLoRA = suite(AdapterSuite, "lora", settings={"adapters.lora.rank": 2, "model.num_layers": 1, **ATTENTION})
SUITES: dict[str, Callable[[], Any]] = {
    "Jotter": suite(DataSuite, "jotter", settings=NOTES),
    "Buffered": suite(DataSuite, "jotter", settings={**NOTES, "data.shuffle_buffer": 30}),
    "Table": suite(DataSuite, "table", settings=TABLE, examples={"column": ["title"], "delimiter": [";"]}),
    "WithoutExamples": suite(DataSuite, "table", settings=TABLE, examples={}),
    "Glyph": suite(TokenizerSuite, "glyph", settings=WORDS, num_tokens=265, longest_match=True),
    "WithoutNumbers": suite(TokenizerSuite, "glyph", settings=WORDS, num_tokens=None, longest_match=True),
    "Plotter": Plotter,
    "Tally": suite(CommandSuite, "tally", refused=(("--runs", "nowhere"),)),
    "Untried": suite(CommandSuite, "tally"),
    "Tinto": suite(PrecisionSuite, "tinto", settings={"kernels.linear": "press"}, tolerance=0.02),
    "Bare": suite(ModelSuite, "peregrine"),
    "Folio": suite(FormatSuite, "folio"),
    "Ulysses": Ulysses,
    "Coarse": Coarse,
    "OrthonInOnePass": lambda: own_suite("orthon"),
    **{name.capitalize(): lambda name=name: own_suite(name) for name in ("lento", "orthon", "peregrine", "ringo")},
}


# Sound packages.

Orthon: type[OptimizerSuite] = type(own_suite("orthon"))


@pytest.mark.wide(
    "suites",
    quick=[
        "fp32",
        "test_supports_is_a_pure_function_with_three_answers",
        "test_it_keeps_the_contract",
        "test_a_run_that_names_it_uses_it_and_is_the_run_in_plain_torch",
    ],
)
class TestRingo(type(own_suite("ringo"))):  # type: ignore[misc]
    @pytest.fixture(autouse=True)
    def planted(self, plant: Plant) -> None:
        plant("nova-ringo")


@pytest.mark.wide(
    "suites",
    quick=[
        "test_updates_are_those_of_the_reference",
        "test_it_keeps_the_contract",
        "test_state_is_what_checkpoints_can_hold",
    ],
)
class TestOrthon(Orthon):  # type: ignore[misc, valid-type]
    @pytest.fixture(autouse=True)
    def planted(self, plant: Plant) -> None:
        plant("nova-orthon")


@pytest.mark.wide("suites", quick=["zero2", "test_updates_are_those_of_the_reference"])
class TestOrthonInOnePass(Orthon):  # type: ignore[misc, valid-type]
    """Where it writes weights itself, and says so."""

    @pytest.fixture(autouse=True)
    def planted(self, plant: Plant) -> None:
        plant("nova-orthon", *ONE_PASS)


@pytest.mark.wide(
    "suites",
    quick=[
        "test_values_and_gradients_are_those_of_plain_torch",
        "test_a_run_that_names_it_uses_it_and_is_the_run_in_plain_torch",
        "test_it_keeps_the_contract",
        "test_it_has_the_capabilities_that_it_grants",
    ],
)
class TestDelayed(KernelSuite):
    """With a grid that is finer than fp32 and wide enough for any step."""

    plugin = "delayed"
    dtypes = ("fp32",)
    settings = {"kernels.delayed.bits": 30, "kernels.delayed.margin": 16.0}
    examples = {"bits": [6]}
    beside = {"margin": {"kernels.delayed.bits": 6}}
    without_effect = {"history": "it counts steps, and the suite looks at one"}

    @pytest.fixture(autouse=True)
    def planted(self, plant: Plant) -> None:
        plant("acme-delayed")


OTHERS = ("folio", "glyph", "jotter", "lento", "peregrine", "plotter", "table", "tally", "tinto", "ulys")
SKIPPED_BY_PEREGRINE = (
    "is refused",
    "(ParallelBlock) and 'readout' (Readout) declare no mixing",  # it was written before declarations
    "does not state that its steps can be replayed",
    "so it has no published form",
    "is sampled from without a cache",
)


@pytest.mark.wide("suites")
@pytest.mark.parametrize("package", OTHERS)
def test_a_sound_package_passes_its_own_tests(own_tests: Callable[..., str], package: str) -> None:
    lines = own_tests(f"nova-{package}", "-rA").splitlines()
    if package == "peregrine":
        skipped = [line for line in lines if line.startswith("SKIPPED")]
        assert [line for line in skipped if not any(words in line for words in SKIPPED_BY_PEREGRINE)] == []
        for layout in ("pp2", "dp2", "dp2pp2"):
            name = f"TestPeregrine::test_a_layout_gives_the_run_of_one_process[{layout}]"
            assert any(line.startswith("PASSED") and line.endswith(name) for line in lines), name


# Planted faults.


def faults() -> Iterator[Any]:
    """The rows of all files as parameters: a package, how its suite is called, and the row."""
    for path in sorted((HERE / "suite_faults").glob("*.yaml")):
        for call, rows in yaml.safe_load(path.read_text()).items():
            for number, (name, row) in enumerate(rows.items()):
                marks = [pytest.mark.wide("suites")] if number or call.startswith("wide ") else []
                yield pytest.param(path.stem, call, row, id=f"{path.stem}: {name}", marks=marks)


def pairs(changes: list[str]) -> list[str]:
    """Old and new texts in turn."""
    return [text for change in changes for text in change.split(" => ")]


@pytest.mark.parametrize(("package", "call", "row"), list(faults()))
def test_a_suite_catches(
    package: str, call: str, row: list[str], plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mplug_estimates.unmet.kernels_that_would_do", lambda *_: "")  # a process per installed kernel
    *changes, words = row
    suite, test, arguments = re.fullmatch(r"(?:wide )?(\w+)\.(\w+)(\[.*])?", call).groups()  # type: ignore[union-attr]
    plant(package, *(ONE_PASS if suite == "OrthonInOnePass" else ()), *pairs(changes))
    with pytest.raises(Fault) as caught:
        getattr(SUITES[suite](), test)(*yaml.safe_load(arguments or "[]"))
    assert [word for word in words.split(" ... ") if word not in str(caught.value)] == [], str(caught.value)


def test_a_slot_that_is_served_in_one_type_only_is_no_fault_of_the_others(plant: Plant) -> None:
    rows = yaml.safe_load((HERE / "suite_faults" / "nova-ringo.yaml").read_text())
    values = "test_values_and_gradients_are_those_of_plain_torch"
    plant("nova-ringo", *pairs(rows[f"Ringo.{values}[bf16]"]["what it serves in one type only is wrong"][:-1]))
    getattr(own_suite("ringo"), values)("fp32")


# Faults that are more than one replaced text.


@operator("acme::silent")
def silent(total: Tensor, values: Tensor) -> None:
    """Adds in forward, and does not say so in `mutates_args`: of a row for acme-delayed."""
    if torch._C._current_graph_task_id() == -1:
        total.add_(values)


OVER, ROWS = '"input": (*TOKENS, *experts, *inputs)', "return torch.where(inside[:, None], rows, 0.0)"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", ""),
        (OVER, OVER.replace("*experts, ", ""), "of the expert that a rank has; add 'expert' to its `over`"),
        (ROWS, "return rows", "after two micro batches, the max 'up_input' is"),
    ],
    ids=["as it is", "experts left out", "rows after the groups"],
)
def test_a_fault_of_the_buffers_of_experts_is_caught(plant: Plant, old: str, new: str, message: str) -> None:
    plant("acme-delayed", old, new)
    from acme_delayed import Delayed

    offer = Delayed(Delayed.Config(bits=30)).offer()[1]
    for weight in WEIGHTS:
        found = BufferTrial(offer, "Experts.product", torch.float32, "cpu", "here", weight).fault(compiles=False)
        assert message.replace("up_", f"{weight}_") in found
        assert bool(found) == bool(message)


@pytest.mark.parametrize("changed", ["merges", "norm"])
def test_an_export_of_adapters_that_computes_something_else_is_a_fault(
    changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LoRA.adapt_model

    def adapt_model(self: LoRA, run: Any, model: Any) -> None:
        original(self, run, model)
        if changed == "norm":
            model.module.get_submodule("blocks.0.norm1").eps = 1e-2
        else:
            merge = model.merges["blocks.0.attn.out.weight"]
            model.merges["blocks.0.attn.out.weight"] = replace(merge, compute=lambda w, a, b: w + b @ a)

    adapt_model.mplug_impl = original.mplug_impl  # type: ignore[attr-defined]
    monkeypatch.setattr(LoRA, "adapt_model", adapt_model)
    with pytest.raises(Fault, match="an exported model has other logits than the run"):
        OfLoRA().test_an_export_computes_what_the_adapted_model_computes("tiny")


# What an author does not say, and what a suite does not run.


def test_a_suite_without_layouts_runs_every_installed_strategy() -> None:
    found: dict[str, Any] = {}
    asking = SimpleNamespace(fixturenames=["layout"], parametrize=lambda name, values: found.update({name: values}))
    OfLoRA().pytest_generate_tests(asking)
    assert {"tp2", "fsdp2", "pp2", "cp2", "zero2"} <= {*found["layout"]}


def test_true_is_another_value_than_one() -> None:
    assert list(other_values(bool | int, (), 1))[:2] == [False, True]
    assert list(other_values(bool, (), True)) == [False]


def test_auxiliary_losses_are_noted_beside_a_module_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nova_forbidden", None)  # as Python holds a module whose import is forbidden
    with auxiliary_losses() as seen:
        router.add_auxiliary(torch.zeros(2), torch.tensor(3.0), torch.tensor(0.5))
    assert [float(loss) for loss in seen] == [1.5]
    assert router.add_auxiliary is statistics.add_auxiliary


def test_without_a_reference_the_suite_of_tokenizers_says_that_it_needs_one(plant: Plant) -> None:
    plant("nova-glyph")
    with pytest.raises(SkipTest, match=r"^needs a reference: override `reference` with the tokens of a text"):
        SUITES["Glyph"]().test_its_tokens_are_those_of_its_reference()


def test_a_suite_computes_with_one_thread_however_many_there_are() -> None:
    """Threads that wait for each other made a suite of observers take minutes on two busy cores."""
    before, tried = torch.get_num_threads(), Plotter()
    torch.set_num_threads(2)
    tried.setup_method()
    within = torch.get_num_threads()
    tried.teardown_method()
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert (within, after) == (1, 2)


ONE_PROCESS = "test_a_layout_gives_the_run_of_one_process"


@pytest.mark.parametrize(
    ("package", "name", "test", "layout", "words"),
    [
        ("nova-peregrine", "Peregrine", ONE_PROCESS, "tp3", "tp=3"),
        ("nova-ulys", "Ulysses", ONE_PROCESS, "ulys8dp2", "ulys=8"),
        ("nova-ulys", "Ulysses", "test_a_layout_is_data", "ulys8dp2", "ulys=8"),
    ],
)
def test_a_layout_that_the_author_names_may_not_be_refused(
    package: str, name: str, test: str, layout: str, words: str, plant: Plant
) -> None:
    """One that the suite tries on its own account may."""
    plant(package)
    tried = type(SUITES[name]())
    with pytest.raises(SkipTest, match=f"layout '{layout}' .*is refused: .*{words}"):
        getattr(suite(tried, tried.plugin, layouts=None)(), test)(layout)
    with pytest.raises(Fault, match=f"layout '{layout}' .*is refused; set 'settings' or 'layouts' .*{words}"):
        getattr(suite(tried, tried.plugin, layouts=(layout,))(), test)(layout)


def test_a_variant_that_the_author_adds_may_not_be_refused(plant: Plant) -> None:
    plant("nova-ulys")
    own = {"own": {"model.num_attention_heads": 1, "model.num_kv_heads": 1}}
    tried = suite(Ulysses, "ulys", layouts=("ulys2", "ulys8"), variants={**ParallelSuite.variants, **own})()
    with pytest.raises(Fault, match=r"^layout 'ulys8' is refused"):
        tried.test_its_layouts_are_data()
    refused = r"^under layout 'ulys2' with 'own' the run is refused; .*ulys=2 does not divide the 1 query heads"
    with pytest.raises(Fault, match=refused):
        tried.test_a_variant_gives_the_run_of_one_process("own")


# What the host does with these packages.

DROPOUT, ONE_KV_HEAD = (ParallelSuite.variants[name] for name in ("dropout", "one-kv-head"))


WHOLE_STREAM = {**DROPOUT, **ONE_KV_HEAD, "parallel.tp.sequence_parallel": False}


@pytest.mark.wide("layouts")
@pytest.mark.parametrize("settings", [DROPOUT, WHOLE_STREAM], ids=["divided stream", "whole stream"])
def test_heads_and_sequence_are_divided_by_two_strategies_at_once(settings: dict[str, Any], plant: Plant) -> None:
    plant("nova-ulys")
    tried = suite(ParallelSuite, "ulys", layouts=("ulys2tp2",), variants={"own": settings})()
    tried.test_a_variant_gives_the_run_of_one_process("own")


def test_a_strategys_reason_names_no_kernel_as_the_remedy(plant: Plant) -> None:
    plant("nova-ulys")
    with pytest.raises(UsageError) as caught:
        build_model(tiny_run({"parallel.layout": "ulys8"}))
    assert str(caught.value).endswith("ulys=8 does not divide the 4 query heads of a rank; use ulys=1 or 2 or 4")


def test_a_state_that_a_checkpoint_cannot_hold_is_refused_before_a_process_starts(
    plant: Plant, cli: Callable[..., Any], tmp_path: Path, tiny: list[str]
) -> None:
    kept = "return self.rules[piece.name].state"
    plant("nova-orthon", kept, 'return {"weight": piece.master}')
    with pytest.raises(UsageError, match=r"keeps a state 'weight' of '.*': .*rename the state"):
        build(tiny_run({"optimizer.name": "orthon"}))
    said = r"keeps a state 'rows' of '.*' of shape \(\d+,\), and the weight has shape \(\d+, \d+\): .*ShapedState"
    plant("nova-orthon", kept, 'return {"rows": piece.master.sum(dim=-1)}')
    result = cli("train", "--optimizer", "orthon", "--parallel", "dp2", *tiny, path=tmp_path / "planted-1")
    assert result.returncode == 2, result.stderr
    assert re.search(f"^mplug: optimizers/orthon {said}", result.stderr)
    assert not (tmp_path / "runs").exists()
    with pytest.raises(UsageError, match=said):  # a process that another launcher started
        build(tiny_run({"optimizer.name": "orthon"}))
