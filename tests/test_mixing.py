"""Mixing of tokens is declared: layouts that divide what a module mixes are refused, all others are right."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple
from unittest import SkipTest

import pytest
import torch
from click.testing import CliRunner
from layout_words import RECOMPUTED, layouts
from tiny_models import EXPERTS
from torch import Tensor, nn

from mplug import Flops, Model, Plan, Unit, UsageError
from mplug.cli import main
from mplug.model.build import build_model
from mplug_invariance import statements
from mplug_nn import MLP, MixtureOfExperts, Router
from mplug_testing import Fault, ModelSuite
from mplug_testing.harness import EXACT, tiny_run
from mplug_testing.parity import error_of

Settings = dict[str, Any]
Plant = Callable[..., None]

LENTO: Settings = {
    "model": {"name": "lento", "num_layers": 3, "hidden_size": 32, "state_size": 24, "vocab_size": 259},
}
MIXTRAL: Settings = {"model": {name.partition(".")[2]: value for name, value in EXPERTS.items()}}
CAPACITY: Settings = {**MIXTRAL, "model.capacity_factor": 1.0}
PEREGRINE: Settings = {"model": {"name": "peregrine", "num_layers": 2, "hidden_size": 32, "vocab_size": 259}}
WHOLE_STREAM: Settings = {"parallel.tp.sequence_parallel": False}
DECLARATION = '    mixes: ClassVar[frozenset[str]] = frozenset({"sequence"})\n\n    def __init__(self, state_size'
WITHOUT = "    def __init__(self, state_size"


def accept(settings: Settings, layout: str) -> None:
    build_model(tiny_run({**settings, "parallel.layout": layout}))


def refusal(settings: Settings, layout: str = "") -> str:
    with pytest.raises(UsageError) as caught:
        accept(settings, layout)
    return str(caught.value)


def fault_of_suite(settings: Settings) -> str:
    """What the model suite says of a model's mixing."""
    kind = type("Suite", (ModelSuite,), {"plugin": settings["model"]["name"], "settings": settings})
    with pytest.raises(Fault) as caught:
        kind().test_what_its_modules_mix_is_declared()
    return str(caught.value)


# A recurrence, as a third party writes it, and a strategy of another.


@pytest.mark.parametrize("layout", ["tp2", "pp2", "zero2", "fsdp2"])
@pytest.mark.wide("layouts", quick=["pp2"])
def test_a_recurrence_computes_what_one_process_does(layout: str, plant: Plant) -> None:
    plant("nova-lento")
    assert error_of(LENTO, layout) < EXACT


SCAN = "F.silu(gate) * self.scan(forget, value))\n"
ON_STREAM = "F.silu(gate) * value)\n        y = self.scan(y, y)\n"
WRITTEN = "        z = torch.zeros(y.shape)\n        z[:, 1:] = y[:, 1:]\n        y = self.scan(z, z)\n"
KEPT = "        kept = torch.sigmoid(forget + self.decay)\n"
RECURRENCE = "        self.scan = Recurrence(config.state_size)\n"
MIXER = "        self.mixer = nn.AvgPool1d(2)\n"
ONES = 'Init("constant", value=1.0))'
SQUARE: Settings = {**LENTO, "model.state_size": 32}
MIXED = (
    "parallel/{0} divides the sequence ({0}=2), and 'blocks.*.scan' (Recurrence) mixes it (one position depends on "
    "another outside of slots); use a layout without {0}"
)
OR_WHOLE = ", or set parallel.tp.sequence_parallel=false"
UNDECLARED = (
    "parallel/cp divides the sequence (cp=2), and no declaration states whether 'blocks.*.scan' (Recurrence) mixes "
    "it (whether one position depends on another outside of slots); add to Recurrence `mixes = "
    "frozenset({'sequence'})` if so, `mixes = frozenset()` if not; or use a layout without cp"
)
PLAIN_INIT = "    def __init__(self, config: Config) -> None:\n        self.config = config\n"


def answering(answer: str) -> tuple[str, str]:
    """The change by which the strategy answers for the first recurrence."""
    hook = f"def support_mixing(self, mixing): return {{'blocks.0.scan': {answer}}}"
    return PLAIN_INIT, f"{PLAIN_INIT}\n    @hookimpl\n    {hook}\n"


HEADS = DECLARATION.replace('"sequence"', '"sequence", "mlp"')


class Refused(NamedTuple):
    """A layout, words of its refusal, the settings, and what is changed in the two packages."""

    layout: str
    said: str
    settings: Settings = LENTO
    lento: tuple[str, str] = ("", "")
    ulys: tuple[str, str] = ("", "")


BY_TP, IN_PLACE = "tp divides the sequence…", f"F.silu(gate) * value)\n{WRITTEN}"
HEADS_DIVIDED = "parallel/tp divides the mlp (tp=2), and 'blocks.*.scan' (Recurrence) mixes it…"
NO_TRIAL = f"{OR_WHOLE[2:]}: running the units without memory, to see which…"
OF_PLAN = "add to the plan `mixing={'blocks.*.mixer': ('sequence',)}` if so, with () if not…"
REFUSED = {
    "a divided sequence, cp": Refused("cp2", MIXED.format("cp")),
    "a divided sequence, ulys": Refused("ulys2", MIXED.format("ulys")),
    "no declaration": Refused("cp2", UNDECLARED, lento=(DECLARATION, WITHOUT)),
    "the divided residual stream": Refused("tp2", MIXED.format("tp") + OR_WHOLE, SQUARE, (SCAN, ON_STREAM)),
    "both of it": Refused("tp2", BY_TP, SQUARE, (SCAN, f"{SCAN}        y = y + self.scan(y, y)\n")),
    "a call that is not seen": Refused("tp2", BY_TP, lento=(SCAN, SCAN.replace("self.scan(", "self.scan.forward("))),
    "a failing dry run": Refused("tp2", NO_TRIAL, lento=(KEPT, f"{KEPT}        assert float(kept.max()) <= 1\n")),
    "a tensor that is written in place": Refused("tp2", BY_TP, SQUARE, (SCAN, IN_PLACE)),
    "heads that weights divide": Refused("tp2", HEADS_DIVIDED, {**LENTO, **WHOLE_STREAM}, (DECLARATION, HEADS)),
    "another package": Refused("cp2", OF_PLAN, lento=(RECURRENCE, f"{RECURRENCE}{MIXER}")),
    "a strategy that answers None": Refused("ulys2", "without ulys", ulys=answering("None")),
    "a strategy with a reason": Refused("ulys2", "without ulys, or set it", ulys=answering("'set it'")),
    "an axis of a strategy that the plan lacks": Refused(
        "ulys2",
        "parallel/ulys divides 'sequnce' of batch entries, and no entry of the model's plan has this axis; did you "
        "mean 'sequence'?",
        ulys=('entries={"sequence": contiguous}', 'entries={"sequnce": contiguous}'),
    ),
    "an axis of a parameter that the plan lacks": Refused(
        "",
        "the plan declares that parameter 'blocks.*.scan.decay' is over 'sequnce', and no parameter, entry or "
        "activation has this axis; did you mean 'sequence'?",
        lento=(ONES, f'{ONES[:-1]}, over=("batch", "sequnce"))'),
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_a_layout_that_divides_what_a_module_may_mix_is_refused(case: Refused, plant: Plant) -> None:
    plant("nova-lento", *case.lento)
    plant("nova-ulys", *case.ulys)
    said = refusal(case.settings, case.layout)
    assert case.said.strip("…") in said
    assert case.said.endswith("…") or said.splitlines()[0].endswith(case.said), "and nothing more"


def test_layouts_that_divide_nothing_that_a_module_mixes_are_accepted(plant: Plant) -> None:
    plant("nova-lento", DECLARATION, HEADS)
    accept(LENTO, "pp2")
    plant("nova-lento", SCAN, ON_STREAM)
    accept({**SQUARE, **WHOLE_STREAM}, "tp2")
    plant("nova-lento", DECLARATION, WITHOUT)
    for layout in ("", "tp2", "pp2", "zero2", "fsdp2"):  # in none of them the recurrence sees a part of the sequence
        accept(LENTO, layout)
    plant("nova-ulys", *answering("True, **dict.fromkeys(mixing, True)"))
    plant("nova-lento")
    accept(LENTO, "ulys2")


def test_the_dry_run_leaves_the_model_as_it_was(plant: Plant) -> None:
    plant("nova-lento")
    run = tiny_run({**LENTO, "parallel.layout": "tp2"})
    with torch.device("meta"):
        model = run.hooks.call.build_model(run=run)
    model.place(run.mesh, None)
    scans = {f"blocks.{number}.scan": frozenset({"sequence"}) for number in range(3)}
    before = {name: dict(vars(part)) for name, part in model.module.named_modules()}
    (answer,) = [said for _, said in run.hooks.each("support_mixing", run=run, model=model, mixing=scans)]
    assert answer == dict.fromkeys(scans, True)
    after = {name: vars(part) for name, part in model.module.named_modules()}
    for name, attributes in before.items():
        for slot in ("gather", "scatter", "lookup", "cross_entropy", "_forward_pre_hooks"):
            assert attributes.get(slot) == after[name].get(slot), f"{name}.{slot}"


# Experts with a capacity, and a balance over micro batches.


def test_experts_with_a_capacity_and_a_whole_stream_compute_what_one_process_does() -> None:
    assert error_of(CAPACITY, "tp2 parallel.tp.sequence_parallel=false") < EXACT


@pytest.mark.wide("experts")
@pytest.mark.parametrize("layout", ["zero2", "ep2", "pp2", "fsdp2", "dp2"])
@pytest.mark.parametrize("settings", [CAPACITY, {**MIXTRAL, "model.moe_balance": "micro_batch"}])
def test_what_mixes_samples_computes_what_one_process_does(settings: Settings, layout: str) -> None:
    assert error_of(settings, layout) < EXACT


DIVIDED = ["cp2", "tp2"]  # two chunks of a zigzag; a contiguous part
MORE = [
    "tp2cp2",
    "tp2cp2ep4",
    "cp4 parallel.cp.method=hierarchical parallel.cp.ulysses_degree=2",
    "cp2 parallel.cp.method=ulysses",
    f"tp2cp2 {RECOMPUTED}",
    "cp2dp2",
    "cp2etp2",
    "cp2pp2",
]


@pytest.mark.parametrize("layout", layouts(DIVIDED, MORE, "experts"))
@pytest.mark.parametrize("dropping", ["position", "probability"])
@pytest.mark.wide("experts")
def test_tokens_of_a_divided_sequence_compete_for_room_as_in_one_process(layout: str, dropping: str) -> None:
    assert error_of({**CAPACITY, "model.capacity_dropping": dropping}, layout) < EXACT


@pytest.mark.parametrize(
    ("feature", "module"),
    [
        ({"model.capacity_factor": 1.0}, "'blocks.*.moe' (MixtureOfExperts)"),
        ({"model.moe_balance": "micro_batch"}, "'blocks.*.moe.router' (Router)"),
    ],
)
def test_what_mixes_samples_needs_micro_batches_whose_size_no_layout_changes(feature: Settings, module: str) -> None:
    free: Settings = {**MIXTRAL, **feature, "trainer.micro_batch_size": None}
    mixed = f"{module} mixes the samples of a micro batch"
    assert refusal(free, "dp2") == (
        f"{mixed}, and trainer.micro_batch_size is null, so the content of a micro batch depends on the 2 "
        f"data-parallel ranks; set trainer.micro_batch_size"
    )
    uneven: Settings = {**MIXTRAL, **feature, "trainer.eval_samples": 6}
    assert refusal(uneven, "dp2") == (
        f"{mixed}, and trainer.eval_samples=6 is no multiple of 2 x 2 data-parallel ranks, so the content of a micro "
        f"batch depends on the layout; set trainer.eval_samples to a multiple of 4"
    )
    accept(free, "")
    accept({**MIXTRAL, "trainer.micro_batch_size": None}, "dp2")


@pytest.mark.parametrize("dropping", ["position", "probability"])
def test_the_suite_finds_a_capacity_that_is_not_declared(dropping: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MixtureOfExperts, "mixes", frozenset())
    roomy: Settings = {**CAPACITY, "model.capacity_factor": 10.0, "model.capacity_dropping": dropping}
    assert "unit 'blocks.*' mixes the batch: " in fault_of_suite(roomy)


def test_the_suite_finds_a_loss_over_a_micro_batch_that_is_not_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Router, "mixes", frozenset())
    assert "unit 'blocks.*' mixes the batch: " in fault_of_suite({**MIXTRAL, "model.moe_balance": "micro_batch"})


# Plugins that were written before there were declarations.


def test_blocks_without_declarations_are_refused_where_a_sequence_is_divided_and_only_there(plant: Plant) -> None:
    plant("nova-peregrine")
    for layout in ("", "pp2", "dp2", "zero2", "fsdp2"):
        accept(PEREGRINE, layout)
    accept({**PEREGRINE, **WHOLE_STREAM}, "tp2")
    for layout, name in (("cp2", "cp"), ("tp2", "tp")):
        said = refusal(PEREGRINE, layout)
        assert f"parallel/{name} divides the sequence ({name}=2), and no declaration states whether" in said
        assert "'layers.*' (ParallelBlock) and 'readout' (Readout) mix it" in said
        assert "add to ParallelBlock and Readout `mixes = frozenset({'sequence'})` if so" in said


@pytest.mark.wide("suites")
def test_the_suite_says_what_to_add_to_blocks_that_mix_nothing(plant: Plant) -> None:
    plant("nova-peregrine")
    kind = type("Suite", (ModelSuite,), {"plugin": "peregrine", "settings": PEREGRINE})
    with pytest.raises(SkipTest, match=r"ParallelBlock.*this test observed none; add `mixes = frozenset\(\)`"):
        kind().test_what_its_modules_mix_is_declared()


def test_explain_says_what_is_mixed_and_what_is_not_known(plant: Plant) -> None:
    def said(settings: Settings) -> str:
        words = [f"{name}={value}" for name, value in flat(settings)]
        options = [word for setting in words for word in ("--set", setting)]
        finished = CliRunner().invoke(main, ["explain", *options])
        assert finished.exit_code == 0, finished.output
        return finished.output.partition("Mixed outside of slots\n")[2]

    assert "nothing: every module computes each position of each sample independently" in said(MIXTRAL)
    plant("nova-lento")
    assert "blocks.*.scan      3  Recurrence  sequence" in said(LENTO)
    plant("nova-peregrine")
    unknown = said(PEREGRINE)
    assert "ParallelBlock  not known" in unknown
    assert "layers.*: unknown, because ParallelBlock does not declare which axes it mixes (`mixes`)" in unknown
    assert "nothing: the same losses" not in unknown


def flat(settings: Settings) -> list[tuple[str, Any]]:
    return [*((f"model.{name}", value) for name, value in settings["model"].items())]


# Strategies.


# What classes and plans say of it, and which of it counts.


class Silent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Declared(Silent):
    mixes: ClassVar[frozenset[str]] = frozenset({"sequence"})


class Smaller(Declared):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)


class Other(Declared):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(1)


class Wider(MLP):
    def activate(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return x.roll(1, 1)


class Configured(Silent):
    def __init__(self, axes: Any) -> None:
        super().__init__()
        self.axes = axes

    @property
    def mixes(self) -> Any:
        return self.axes


def model_of(**modules: nn.Module) -> Model:
    units = tuple(Unit(name, ("hidden",), ("hidden",)) for name in modules)
    tokens = ("batch", "sequence")
    plan = Plan(units, {}, {"tokens": tokens}, {"hidden": (*tokens, "embed")}, Flops(0, 0))
    return Model(nn.ModuleDict(modules), plan)


def known_of(module: nn.Module) -> frozenset[str] | None:
    return statements(model_of(unit=module))[0].axes


@pytest.mark.parametrize(
    ("module", "axes"),
    [
        (Silent(), None),
        (Declared(), {"sequence"}),
        (Smaller(), {"sequence"}),  # the code that was declared
        (Other(), None),  # other code than the one that was declared
        (Wider(4, 8, "gelu", False), None),
        (Configured({"batch", "sequence"}), {"batch", "sequence"}),
        (Configured(()), set()),
        (nn.LayerNorm(4), set()),
        (nn.LayerNorm((3, 4)), None),
        (nn.Conv1d(2, 2, 3), None),
        (nn.BatchNorm1d(2), None),
        (nn.Sequential(), set()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_declaration_covers_the_code_of_the_class_that_makes_it(module: nn.Module, axes: set[str] | None) -> None:
    assert known_of(module) == axes


def test_each_module_inside_a_declared_one_needs_a_declaration_of_its_own() -> None:
    block = Declared()
    block.inner = nn.ModuleList([Silent(), Declared()])
    found = {one.name: one.axes for one in statements(model_of(unit=block))}
    assert found == {"unit": {"sequence"}, "unit.inner": set(), "unit.inner.0": None, "unit.inner.1": {"sequence"}}


@pytest.mark.parametrize("value", ["sequence", 3, [3]])
def test_a_declaration_that_is_no_set_of_names_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"`mixes` of Configured is .*; it must be a set of named axes"):
        known_of(Configured(value))


def test_declarations_that_are_no_sets_of_axes_of_the_plan_on_a_class_are_refused() -> None:
    module = Silent()
    module.mixes = frozenset()
    with pytest.raises(UsageError, match="'unit' sets `mixes` on itself; make it an attribute or a property"):
        known_of(module)
    with pytest.raises(UsageError, match=r"mixes 'sequnce', and no .* has this axis; did you mean 'sequence'\?"):
        known_of(Configured({"sequnce"}))


def test_the_plan_declares_for_classes_of_other_packages_with_all_that_is_in_them() -> None:
    def found(**mixing: tuple[str, ...]) -> Mapping[str, frozenset[str] | None]:
        block = Declared()
        block.conv = nn.Sequential(nn.Conv1d(2, 2, 3))
        model = model_of(unit=block)
        patterns = {f"unit.{name}": axes for name, axes in mixing.items()}
        model.plan = replace(model.plan, mixing=patterns)
        return {one.name: one.axes for one in statements(model)}

    assert found()["unit.conv.0"] is None
    of_conv = {"unit.conv": frozenset({"sequence"}), "unit.conv.0": frozenset()}
    assert found(conv=("sequence",)) == {"unit": frozenset({"sequence"}), **of_conv}
    with pytest.raises(UsageError, match=r"no module matches 'unit\.cnov'; did you mean"):
        found(cnov=("sequence",))
