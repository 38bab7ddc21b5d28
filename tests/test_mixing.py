"""Mixing of tokens is declared: layouts that divide what a module mixes are refused, all others are right."""

from collections.abc import Callable
from typing import Any
from unittest import SkipTest

import pytest
import torch
from click.testing import CliRunner

from mplug import UsageError
from mplug.cli import main
from mplug.model.build import build_model
from mplug_nn import MixtureOfExperts, Router
from mplug_testing import Fault, ModelSuite
from mplug_testing.harness import EXACT, tiny_run
from mplug_testing.parity import error_of

Settings = dict[str, Any]
Plant = Callable[..., None]

LENTO: Settings = {
    "model": {"name": "lento", "num_layers": 3, "hidden_size": 32, "state_size": 24, "vocab_size": 259},
}
MIXTRAL: Settings = {
    "model": {"name": "mixtral", "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_kv_heads": 2},
    "model.vocab_size": 259,
    "model.ffn_hidden_size": 32,
    "model.num_experts": 4,
    "model.init_std": 0.06,
}
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


# A recurrence, as a third party writes it.


@pytest.mark.parametrize("layout", ["tp2", "pp2", "zero2", "fsdp2"])
def test_a_recurrence_computes_what_one_process_does(layout: str, plant: Plant) -> None:
    plant("nova-lento")
    assert error_of(LENTO, layout) < EXACT


@pytest.mark.parametrize("strategy", ["cp", "ulys"])
def test_a_recurrence_whose_sequence_is_divided_is_refused(strategy: str, plant: Plant) -> None:
    plant("nova-lento")
    plant("nova-ulys")
    assert refusal(LENTO, f"{strategy}2") == (
        f"parallel/{strategy} divides the sequence ({strategy}=2), and 'blocks.*.scan' (Recurrence) mixes it (one "
        f"position depends on another outside of slots); use a layout without {strategy}"
    )


def test_a_recurrence_that_declares_nothing_is_refused_with_the_declaration_to_add(plant: Plant) -> None:
    plant("nova-lento", DECLARATION, WITHOUT)
    assert refusal(LENTO, "cp2") == (
        "parallel/cp divides the sequence (cp=2), and no declaration states whether 'blocks.*.scan' (Recurrence) mixes "
        "it (whether one position depends on another outside of slots); add to Recurrence `mixes = "
        "frozenset({'sequence'})` if so, `mixes = frozenset()` if not; or use a layout without cp"
    )
    for layout in ("", "tp2", "pp2", "zero2", "fsdp2"):  # of none of them the recurrence sees a part of the sequence
        accept(LENTO, layout)


# Tensor parallelism: where the stream is divided.

SCAN = "F.silu(gate) * self.scan(forget, value))\n"
SQUARE: Settings = {**LENTO, "model.state_size": 32}


def test_a_recurrence_on_the_divided_residual_stream_is_refused(plant: Plant) -> None:
    plant("nova-lento", SCAN, "F.silu(gate) * value)\n        y = self.scan(y, y)\n")
    assert refusal(SQUARE, "tp2") == (
        "parallel/tp divides the sequence (tp=2), and 'blocks.*.scan' (Recurrence) mixes it (one position depends on "
        "another outside of slots); use a layout without tp, or set parallel.tp.sequence_parallel=false"
    )
    accept({**SQUARE, **WHOLE_STREAM}, "tp2")


def test_a_recurrence_that_gets_the_whole_sequence_and_a_part_of_it_is_refused(plant: Plant) -> None:
    plant("nova-lento", SCAN, f"{SCAN}        y = y + self.scan(y, y)\n")
    assert "tp divides the sequence" in refusal(SQUARE, "tp2")


def test_a_recurrence_whose_call_is_not_seen_is_refused(plant: Plant) -> None:
    plant("nova-lento", SCAN, SCAN.replace("self.scan(", "self.scan.forward("))
    assert "tp divides the sequence" in refusal(LENTO, "tp2")


def test_where_it_cannot_be_told_what_is_divided_the_reason_is_given(plant: Plant) -> None:
    sigmoid = "        kept = torch.sigmoid(forget + self.decay)\n"
    plant("nova-lento", sigmoid, f"{sigmoid}        assert float(kept.max()) <= 1\n")
    said = refusal(LENTO, "tp2")
    assert "or set parallel.tp.sequence_parallel=false: running the units without memory, to see which" in said


def test_what_is_written_into_a_tensor_in_place_is_divided_too(plant: Plant) -> None:
    written = (
        "        z = torch.zeros(y.shape, device=y.device)\n        z[:, 1:] = y[:, 1:]\n        y = self.scan(z, z)\n"
    )
    plant("nova-lento", SCAN, f"F.silu(gate) * value)\n{written}")
    assert "tp divides the sequence" in refusal(SQUARE, "tp2")


def test_the_dry_run_leaves_the_model_as_it_was(plant: Plant) -> None:
    plant("nova-lento")
    run = tiny_run({**LENTO, "parallel.layout": "tp2"})
    with torch.device("meta"):
        model = run.hooks.call.build_model(run=run)
    model.place(run.mesh, None)
    before = {name: dict(vars(part)) for name, part in model.module.named_modules()}
    (answer,) = [said for _, said in run.hooks.each("support_mixing", run=run, model=model, mixing=SCANS)]
    assert answer == dict.fromkeys(SCANS, True)
    after = {name: vars(part) for name, part in model.module.named_modules()}
    slots = ("gather", "scatter", "lookup", "cross_entropy", "_forward_pre_hooks")
    for name, attributes in before.items():
        for slot in slots:
            assert attributes.get(slot) == after[name].get(slot), f"{name}.{slot}"


SCANS = {f"blocks.{number}.scan": frozenset({"sequence"}) for number in range(3)}


# Experts with a capacity, and a balance over micro batches.


def test_experts_with_a_capacity_and_a_whole_stream_compute_what_one_process_does() -> None:
    assert error_of(CAPACITY, "tp2 parallel.tp.sequence_parallel=false") < EXACT


@pytest.mark.wide("experts")
@pytest.mark.parametrize("layout", ["zero2", "ep2", "pp2", "fsdp2", "dp2"])
@pytest.mark.parametrize("settings", [CAPACITY, {**MIXTRAL, "model.moe_balance": "micro_batch"}])
def test_what_mixes_samples_computes_what_one_process_does(settings: Settings, layout: str) -> None:
    assert error_of(settings, layout) < EXACT


@pytest.mark.parametrize(("layout", "more"), [("cp2", ""), ("tp2", ", or set parallel.tp.sequence_parallel=false")])
def test_experts_with_a_capacity_whose_sequence_is_divided_are_refused(layout: str, more: str) -> None:
    name = layout[:2]
    assert refusal(CAPACITY, layout) == (
        f"parallel/{name} divides the sequence ({name}=2), and 'blocks.*.moe' (MixtureOfExperts) mixes it (one "
        f"position depends on another outside of slots); use a layout without {name}{more}"
    )
    accept(MIXTRAL, layout)  # without a capacity it computes each position by itself


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
@pytest.mark.parametrize(("declared", "left"), [((), "batch"), (("sequence",), "batch"), (("batch",), "sequence")])
def test_the_suite_finds_a_capacity_that_is_not_declared(
    declared: tuple[str, ...], left: str, dropping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MixtureOfExperts, "mixes", frozenset(declared))
    roomy: Settings = {**CAPACITY, "model.capacity_factor": 10.0, "model.capacity_dropping": dropping}
    assert f"unit 'blocks.*' mixes the {left}: " in fault_of_suite(roomy)


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
    nested = {f"model.{name}": value for name, value in settings["model"].items()}
    return [*nested.items(), *((name, value) for name, value in settings.items() if name != "model")]


def test_the_error_names_the_plan_for_classes_of_other_packages(plant: Plant) -> None:
    source = "        self.scan = Recurrence(config.state_size)\n"
    plant("nova-lento", source, f"{source}        self.mixer = nn.AvgPool1d(2)\n")
    assert "add to the plan `mixing={'blocks.*.mixer': ('sequence',)}` if so, with () if not" in refusal(LENTO, "cp2")


# Strategies.

PLAIN_INIT = "    def __init__(self, config: Config) -> None:\n        self.config = config\n"


def hook(*lines: str) -> str:
    return "\n".join([PLAIN_INIT, "    @hookimpl", *(f"    {line}" for line in lines), ""])


def test_a_strategy_may_support_a_module_that_mixes_what_it_divides(plant: Plant) -> None:
    plant("nova-lento")
    support = ("def support_mixing(self, mixing):", "    assert set(mixing['blocks.0.scan']) == {'sequence'}")
    plant("nova-ulys", PLAIN_INIT, hook(*support, "    return dict.fromkeys(mixing, True)"))
    accept(LENTO, "ulys2")


@pytest.mark.parametrize(("answer", "said"), [("None", "without ulys"), ("'set it'", "without ulys, or set it")])
def test_an_answer_that_is_no_yes_is_a_refusal(answer: str, said: str, plant: Plant) -> None:
    plant("nova-lento")
    support = "def support_mixing(self, mixing):"
    plant("nova-ulys", PLAIN_INIT, hook(support, f"    return {{'blocks.0.scan': {answer}}}"))
    assert refusal(LENTO, "ulys2").splitlines()[0].endswith(said)


def test_a_named_axis_of_a_strategy_that_the_plan_does_not_have_is_refused(plant: Plant) -> None:
    plant("nova-ulys", 'entries={"sequence": contiguous}', 'entries={"sequnce": contiguous}')
    assert refusal({}, "ulys2") == (
        "parallel/ulys divides 'sequnce' of batch entries, and no entry of the model's plan has this axis; did you "
        "mean 'sequence'?"
    )


def test_an_axis_that_a_parameter_is_broadcast_over_and_the_plan_does_not_have_is_refused(plant: Plant) -> None:
    initial = 'Init("constant", value=1.0))'
    plant("nova-lento", initial, 'Init("constant", value=1.0), over=("batch", "sequnce"))')
    assert refusal(LENTO) == (
        "the plan declares that parameter 'blocks.*.scan.decay' is over 'sequnce', and no parameter, entry or "
        "activation has this axis; did you mean 'sequence'?"
    )


def test_what_mixes_heads_is_refused_where_weights_are_divided_by_heads(plant: Plant) -> None:
    plant("nova-lento", DECLARATION, DECLARATION.replace('"sequence"', '"sequence", "mlp"'))
    said = refusal({**LENTO, **WHOLE_STREAM}, "tp2")
    assert said.startswith("parallel/tp divides the mlp (tp=2), and 'blocks.*.scan' (Recurrence) mixes it")
    accept(LENTO, "pp2")
