"""The suites of `mplug_testing`: sound packages of third parties pass them, and they catch what authors get wrong.

A file of `suite_faults` has the faults of one package. A row names a fault: `new` stands where the sound source has
`old`, and the `test` of a suite, called with the `arguments`, must fail with all of the `words`.
"""

import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest
import torch
import yaml
from one_pass import ONE_PASS
from torch import Tensor

from mplug import UsageError
from mplug.model.build import build_model
from mplug.training.assembly import build
from mplug_nn import operator
from mplug_testing import (
    CommandSuite,
    DataSuite,
    ExtensionSuite,
    Fault,
    KernelSuite,
    ModelSuite,
    OptimizerSuite,
    ParallelSuite,
    PrecisionSuite,
    TokenizerSuite,
)
from mplug_testing.grouped import WEIGHTS
from mplug_testing.harness import tiny_run
from mplug_testing.kernel_buffer_checks import BufferTrial

Plant = Callable[..., None]
HERE = Path(__file__).parent
THIRD_PARTY = HERE / "third_party"


# The suites.


class Jotter(DataSuite):
    plugin = "jotter"
    settings = {"data.path": str(THIRD_PARTY / "nova-jotter" / "tests" / "notes.jsonl")}


class Buffered(Jotter):
    settings = {**Jotter.settings, "data.shuffle_buffer": 30}


class Table(DataSuite):
    plugin = "table"
    settings = {"data.path": str(THIRD_PARTY / "nova-table" / "tests" / "notes.csv")}
    examples = {"column": ["title"], "delimiter": [";"]}


class WithoutExamples(Table):
    """Of an author who says nothing about the fields."""

    examples = {}


class Glyph(TokenizerSuite):
    plugin = "glyph"
    settings = {"path": str(THIRD_PARTY / "nova-glyph" / "tests" / "words.txt")}
    num_tokens = 265
    longest_match = True


class WithoutNumbers(Glyph):
    """Of an author who states nothing about the vocabulary."""

    num_tokens = None


class Plotter(ExtensionSuite):
    plugin = "plotter"
    settings = {"extensions.plotter.every": 2}
    files = ("loss.svg",)


class Tally(CommandSuite):
    plugin = "tally"
    refused = (("--runs", "nowhere"),)


class Untried(CommandSuite):
    plugin = "tally"


class Tinto(PrecisionSuite):
    plugin = "tinto"
    settings = {"kernels.linear": "press"}


class Ulysses(ParallelSuite):
    plugin = "ulys"
    refused = {"ulys8": ("ulys=8", "4 query heads")}


class Coarse(KernelSuite):
    """A grid so coarse that its scale shows in every result."""

    plugin = "delayed"
    settings = {"kernels.delayed.bits": 6}


def own_suite(name: str) -> Any:
    """The suite of the package `nova-<name>` in the package's own tests; its plugin must be planted."""
    module = runpy.run_path(str(THIRD_PARTY / f"nova-{name}" / "tests" / f"test_{name}.py"))
    return module[f"Test{name.capitalize()}"]()


SUITES: dict[str, Callable[[], Any]] = {
    **{suite.__name__: suite for suite in (Jotter, Buffered, Table, Glyph, WithoutNumbers, Plotter, Tally, Untried)},
    **{suite.__name__: suite for suite in (Tinto, Ulysses, Coarse)},
    **{name.capitalize(): lambda name=name: own_suite(name) for name in ("lento", "orthon", "peregrine")},
}
Orthon: type[OptimizerSuite] = type(own_suite("orthon"))


class TestOrthon(Orthon):  # type: ignore[misc, valid-type]
    """The package as it is passes the whole suite."""

    layouts = ("dp2", "pp2")

    @pytest.fixture(autouse=True)
    def planted(self, plant: Plant) -> None:
        plant("nova-orthon")


class TestOrthonInOnePass(Orthon):  # type: ignore[misc, valid-type]
    """The package passes the whole suite where it writes weights itself, and says so."""

    layouts = ("zero2",)

    @pytest.fixture(autouse=True)
    def planted(self, plant: Plant) -> None:
        plant("nova-orthon", *ONE_PASS)


@pytest.mark.wide("suites")
class TestOrthonUnderEveryStrategy(TestOrthon):
    layouts = None


@pytest.mark.wide("suites")
class TestOrthonInOnePassUnderEveryStrategy(TestOrthonInOnePass):
    layouts = None


class TestDelayed(KernelSuite):
    """The package as it is passes the whole suite, with a grid that is finer than fp32 and wide enough for any step."""

    plugin = "delayed"
    dtypes = ("fp32",)
    settings = {"kernels.delayed.bits": 30, "kernels.delayed.margin": 16.0}
    examples = {"bits": [6]}
    beside = {"margin": {"kernels.delayed.bits": 6}}
    without_effect = {"history": "it counts steps, and the suite looks at one"}

    @pytest.fixture(autouse=True)
    def planted(self, plant: Plant) -> None:
        plant("acme-delayed")


OTHERS = ("glyph", "jotter", "lento", "peregrine", "plotter", "table", "tally", "tinto", "ulys")
SKIPPED_BY_PEREGRINE = (
    "is refused",
    "(ParallelBlock) and 'readout' (Readout) declare no mixing",  # it was written before declarations
    "does not state that its steps can be replayed",
    "has no external names",
    "is sampled from without a cache",
)


@pytest.mark.wide("suites")
@pytest.mark.parametrize("package", OTHERS)
def test_a_sound_package_passes_its_own_tests(own_tests: Callable[..., str], package: str) -> None:
    lines = own_tests(f"nova-{package}", "-rA").splitlines()
    assert not any(line.startswith(("FAILED", "ERROR")) for line in lines)
    if package == "peregrine":
        skipped = [line for line in lines if line.startswith("SKIPPED")]
        assert all(any(words in line for words in SKIPPED_BY_PEREGRINE) for line in skipped), skipped
        for layout in ("pp2", "dp2", "dp2pp2"):
            name = f"TestPeregrine::test_a_layout_gives_the_run_of_one_process[{layout}]"
            assert any(line.startswith("PASSED") and line.endswith(name) for line in lines), name


# Planted faults.


def faults() -> Iterator[Any]:
    """The rows of all files as parameters: package and row."""
    for path in sorted((HERE / "suite_faults").glob("*.yaml")):
        for name, row in yaml.safe_load(path.read_text()).items():
            marks = [pytest.mark.wide("suites")] if row.get("wide") else []
            yield pytest.param(path.stem, row, id=f"{path.stem}: {name}", marks=marks)


@pytest.mark.parametrize(("package", "row"), list(faults()))
def test_a_suite_catches(package: str, row: dict[str, Any], plant: Plant) -> None:
    plant(package, *([row["old"], row["new"]] if "old" in row else []))
    suite, test = row["test"].split(".")
    words = [row["words"]] if isinstance(row["words"], str) else row["words"]
    with pytest.raises(Fault) as caught:
        getattr(SUITES[suite](), test)(*row.get("arguments", []))
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


# Faults that are more than one replaced text.


@operator("acme::silent")
def silent(total: Tensor, values: Tensor) -> None:
    """Adds in forward, and does not say so in `mutates_args`."""
    if torch._C._current_graph_task_id() == -1:
        total.add_(values)


def test_a_mutation_that_the_compiler_does_not_know_is_caught(plant: Plant) -> None:
    total = 'count(buffers["total"], x.abs().sum(dtype=buffers["total"].dtype))'
    plant("acme-delayed", f"    {total}", f"    {total.replace('count', 'torch.ops.acme.silent')}")
    with pytest.raises(Fault, match="in a compiled unit, the sum 'total'"):
        Coarse().test_its_buffers_are_what_it_declares("fp32")


OF_EXPERTS = {
    "as it is": ("", "", ""),
    "experts left out": (
        '"input": (*TOKENS, *experts, *inputs)',
        '"input": (*TOKENS, *inputs)',
        "'up_input' depends on the part of the expert that a rank has; add 'expert' to its `over`",
    ),
    "rows after the groups": (
        "return torch.where(inside[:, None], rows, 0.0)",
        "return rows",
        "after two micro batches, the max 'up_input' is",
    ),
}


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_a_fault_of_the_buffers_of_experts_is_caught(plant: Plant, name: str) -> None:
    old, new, message = OF_EXPERTS[name]
    plant("acme-delayed", old, new) if old else plant("acme-delayed")
    from acme_delayed import Delayed

    offer = Delayed(Delayed.Config(bits=30)).offer()[1]
    for weight in WEIGHTS:
        found = BufferTrial(offer, "Experts.product", torch.float32, "cpu", "here", weight).fault(compiles=False)
        assert message.replace("up_", f"{weight}_") in found
        assert bool(found) == bool(message)


# What an author does not say, and what a suite does not run.


def test_a_field_for_which_no_value_is_known_makes_the_suite_ask_for_one(plant: Plant) -> None:
    plant("nova-table")
    Table().test_every_field_of_its_config_has_an_effect()
    asking = r"no other value can be derived from its type .*examples = \{'column': \[\.\.\.\]\}"
    with pytest.raises(Fault, match=asking):
        WithoutExamples().test_every_field_of_its_config_has_an_effect()


def test_without_a_reference_the_suite_of_tokenizers_says_that_it_needs_one(plant: Plant) -> None:
    plant("nova-glyph")
    with pytest.raises(SkipTest, match=r"^needs a reference: override `reference` with the tokens of a text"):
        Glyph().test_its_tokens_are_those_of_its_reference()


def test_a_suite_computes_with_one_thread_however_many_there_are() -> None:
    """Threads that wait for each other made a suite of observers take minutes on two busy cores."""
    before, suite = torch.get_num_threads(), Plotter()
    torch.set_num_threads(2)
    suite.setup_method()
    within = torch.get_num_threads()
    suite.teardown_method()
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert (within, after) == (1, 2)


ONE_PROCESS = "test_a_layout_gives_the_run_of_one_process"


@pytest.mark.parametrize(
    ("suite", "test", "layout", "words"),
    [
        ("Peregrine", ONE_PROCESS, "tp3", "tp=3"),
        ("Orthon", "test_a_layout_gives_the_weights_of_one_process", "tp2", "needs whole matrices"),
        ("Ulysses", ONE_PROCESS, "ulys8dp2", "ulys=8"),
        ("Ulysses", "test_a_layout_is_data", "ulys8dp2", "ulys=8"),
    ],
)
def test_a_layout_that_the_author_names_may_not_be_refused(
    suite: str, test: str, layout: str, words: str, plant: Plant
) -> None:
    """One that the suite tries on its own account may."""
    plant({"Ulysses": "nova-ulys"}.get(suite, f"nova-{suite.lower()}"))
    tried = SUITES[suite]()
    named = type("Named", (type(tried),), {"layouts": (layout,)})()
    with pytest.raises(SkipTest, match=f"layout '{layout}' .*is refused: .*{words}"):
        getattr(type("Unnamed", (type(tried),), {"layouts": None})(), test)(layout)
    with pytest.raises(Fault, match=f"layout '{layout}' .*is refused; set 'settings' or 'layouts' .*{words}"):
        getattr(named, test)(layout)


def test_a_variant_that_the_author_adds_may_not_be_refused(plant: Plant) -> None:
    plant("nova-ulys")
    own = {"own": {"model.num_attention_heads": 1, "model.num_kv_heads": 1}}
    suite = type("Own", (Ulysses,), {"layouts": ("ulys2", "ulys8"), "variants": {**ParallelSuite.variants, **own}})()
    with pytest.raises(Fault, match=r"^layout 'ulys8' is refused"):
        suite.test_its_layouts_are_data()
    refused = r"^under layout 'ulys2' with 'own' the run is refused; .*ulys=2 does not divide the 1 query heads"
    with pytest.raises(Fault, match=refused):
        suite.test_a_variant_gives_the_run_of_one_process("own")


def test_settings_that_are_refused_in_one_process_fail(plant: Plant) -> None:
    plant("nova-peregrine")
    tried = SUITES["Peregrine"]()
    type(tried).settings = {**tried.settings, "model.num_kv_heads": 3}
    with pytest.raises(Fault, match=r"^the run is refused in one process.*num_kv_heads=3 does not divide"):
        tried.test_a_layout_gives_the_run_of_one_process("")


class Unimportable(ModelSuite):
    plugin = "peregrine"


def test_a_plugin_that_does_not_import_is_a_fault_and_no_refusal(plant: Plant) -> None:
    plant("nova-peregrine", "from pydantic import", "import no_such_module\nfrom pydantic import")
    with pytest.raises(Fault, match=r"(?s)^layout 'tp2': .*cannot be imported.*No module named 'no_such_module'"):
        Unimportable().test_a_layout_gives_the_run_of_one_process("tp2")


# What the host does with these packages.

DROPOUT, ONE_KV_HEAD = (ParallelSuite.variants[name] for name in ("dropout", "one-kv-head"))


class BesideTensorParallelism(ParallelSuite):
    plugin = "ulys"
    layouts = ("ulys2tp2",)
    variants = {
        "divided-stream": DROPOUT,
        "whole-stream": {**DROPOUT, **ONE_KV_HEAD, "parallel.tp.sequence_parallel": False},
    }


@pytest.mark.parametrize("variant", BesideTensorParallelism.variants)
def test_heads_and_sequence_are_divided_by_two_strategies_at_once(variant: str, plant: Plant) -> None:
    plant("nova-ulys")
    BesideTensorParallelism().test_a_variant_gives_the_run_of_one_process(variant)


def test_a_strategys_reason_names_no_kernel_as_the_remedy(plant: Plant) -> None:
    plant("nova-ulys")
    with pytest.raises(UsageError) as caught:
        build_model(tiny_run({"parallel.layout": "ulys8"}))
    assert str(caught.value).endswith("ulys=8 does not divide the 4 query heads of a rank; use ulys=1 or 2 or 4")


def test_a_state_that_a_checkpoint_cannot_hold_is_refused_before_a_process_starts(
    plant: Plant, cli: Callable[..., Any], tmp_path: Path, tiny: list[str]
) -> None:
    said = r"keeps a state 'rows' of '.*' of shape \(\d+,\), and the weight has shape \(\d+, \d+\)"
    plant("nova-orthon", "return self.rules[piece.name].state", 'return {"rows": piece.master.sum(dim=-1)}')
    result = cli("train", "--optimizer", "orthon", "--parallel", "dp2", *tiny, path=tmp_path / "planted-0")
    assert result.returncode == 2, result.stderr
    assert re.search(f"^mplug: optimizers/orthon {said}", result.stderr)
    assert not (tmp_path / "runs").exists()
    with pytest.raises(UsageError, match=said):  # a process that another launcher started
        build(tiny_run({"optimizer.name": "orthon"}))


def test_a_state_of_the_weights_name_is_refused(plant: Plant) -> None:
    plant("nova-orthon", "return self.rules[piece.name].state", 'return {"weight": piece.master}')
    with pytest.raises(UsageError, match=r"keeps a state 'weight' of '.*': .*rename the state"):
        build(tiny_run({"optimizer.name": "orthon"}))
