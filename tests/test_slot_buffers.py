"""Buffers that a supplier declares: `acme-delayed` keeps largest values of a step, and rounds to them in the next."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from layout_words import COMPILED, RECOMPUTED, WHOLE_STREAM, layouts, under
from tiny_models import MIXTRAL
from torch import Tensor

from mplug import Buffer, Flops, Init, Offer, Parameter, Placement, Plan, Site, SlotBuffer, UsageError
from mplug.cli import main
from mplug.model.build import build_model
from mplug.model.slots.declaration import slot_of
from mplug.training.assembly import Parts
from mplug_nn import Experts, Gemm, Linear, keep_max
from mplug_products import HeldBuffers, slot_updates
from mplug_products.slot_buffers import hold
from mplug_saving.folder import newest
from mplug_saving.states import refuse_unsavable_states
from mplug_steps import Statistics
from mplug_testing import run_workers, runs
from mplug_testing.harness import EXACT, Boxes, Trace, difference, tiny_config, tiny_run, train_steps
from mplug_testing.harness import logical as whole_of
from mplug_testing.workers import WorkerFailed

Plant = Callable[..., None]
Settings = dict[str, Any]
SETTINGS: Settings = {"model.num_layers": 2, "kernels.linear": "delayed"}


@dataclass
class Seen:
    """A rank's trace, and its parts of the suppliers' states after the last step."""

    trace: Trace
    states: dict[str, Boxes]
    shapes: dict[str, tuple[int, ...]]
    graphs: int


def watched(settings: Settings) -> Seen:
    warnings.simplefilter("ignore")  # torch's own, as it traces
    import mplug.training.assembly as assembly
    from mplug.gradients.region import region

    built: list[Parts] = []
    build = assembly.build

    def build_and_keep(run: Any) -> Parts:
        built.append(build(run))
        return built[0]

    assembly.build = build_and_keep
    trace = train_steps(settings)
    model, run = built[0].model, tiny_run(settings)
    states, shapes = dict[str, Boxes](), dict[str, tuple[int, ...]]()
    for name, state in model.states().items():
        placement = model.buffer_placements[name]
        states[name] = [(box.start, region(state, box).clone()) for box in placement.boxes(run.rank)]
        shapes[name] = placement.shape
    from torch._dynamo.utils import counters

    return Seen(trace, states, shapes, counters["stats"]["unique_graphs"])


@cache
def reference(sparse: bool = False) -> Seen:
    return run_workers(1, watched, EXPERTS if sparse else SETTINGS)[0]


def assert_same_run(found: list[Seen], expected: Seen) -> None:
    """The run (see `difference`), and on every rank its part of every state."""
    assert difference([one.trace for one in found], expected.trace) == ""
    assert {name for one in found for name in one.states} == expected.states.keys()
    for name, shape in expected.shapes.items():
        whole = whole_of([expected.states], name, shape)
        for one in found:
            for start, values in one.states.get(name, []):
                part = whole[tuple(slice(s, s + n) for s, n in zip(start, values.shape, strict=True))]
                torch.testing.assert_close(values, part, rtol=EXACT, atol=0, msg=f"{name}: {values} is not {part}")


WIDE = [
    *(f"tp2 {WHOLE_STREAM}", "cp2", "tp2pp2", "dp2tp2", f"fsdp2tp2 {RECOMPUTED}", "zero2 parallel.zero.stage=2"),
    *(f"tp2 {COMPILED} {RECOMPUTED}", "dp2 trainer.micro_batch_size=1"),
]


@pytest.mark.parametrize("layout", layouts(["tp2", "pp2", "fsdp2", "zero2", f"dp2 {RECOMPUTED}"], WIDE))
@pytest.mark.wide("precision", quick=["dp2 memory.recompute.mode=full"])
def test_delayed_scales_give_the_run_and_the_states_of_one_process(plant: Plant, layout: str) -> None:
    plant("acme-delayed")
    ranks, settings = under(SETTINGS, layout)
    assert_same_run(run_workers(ranks, watched, settings), reference())


EXPERTS: Settings = {**MIXTRAL, "kernels.experts": "delayed"}
OF_EXPERTS = [
    *("ep2", f"dp2 {RECOMPUTED}", "tp2", f"tp2 {WHOLE_STREAM}", "etp2", "pp2", "fsdp2", "zero2", "cp2"),
    *(f"ep2 {COMPILED} {RECOMPUTED}", "tp2ep2", "tp2ep2etp2"),
]


@pytest.mark.parametrize("layout", layouts([], OF_EXPERTS))
def test_buffers_of_experts_give_the_run_and_the_states_of_one_process(plant: Plant, layout: str) -> None:
    plant("acme-delayed")
    one, (ranks, settings) = reference(sparse=True), under(EXPERTS, layout)
    assert len([name for name in one.states if "product__down_history" in name]) == 2
    assert_same_run(run_workers(ranks, watched, settings), one)


def test_the_scales_of_a_step_come_from_the_step_before_and_metrics_report_none(plant: Plant) -> None:
    plant("acme-delayed")
    plain = run_workers(1, train_steps, {"model.num_layers": 2})[0]
    found = reference().trace
    assert found.losses[0] == plain.losses[0], "without a history nothing is rounded"
    assert abs(found.losses[1] - plain.losses[1]) > 1e-6
    assert all(bool(values.any()) for boxes in reference().states.values() for _, values in boxes)
    plant("acme-delayed")
    assert reference().trace.statistics == [{}, {}]


# What is refused, before launch.

INPUT = '"input": SlotBuffer(over=(*TOKENS, *inputs), reduction="max")'
SUPPLIER, OFFER = '{"Linear.gemm": gemm}', "buffers=self.buffers, step_ended=step_ended)"
WRAPPED = f'{OFFER}, __import__("mplug").Wrap("Linear.gemm", lambda gemm: gemm, 0{{}})'


FAULTS = {
    "an axis that nothing has": (INPUT, INPUT.replace("*TOKENS", '"bacth"'), "over 'bacth', .* did you mean 'batch'"),
    "a slot without buffers": (SUPPLIER, '{"Linear.gather": str}', "Linear does not pass buffers to Linear.gather"),
    "a wrap that drops them": (
        OFFER,
        WRAPPED.format(""),
        r"wraps this slot without declaring.*\(Wrap.pas",
    ),
    "a name with a blank": ('"last_total": Sl', '"last total": Sl', "'last total' is not a valid name"),
    "no declaration": (INPUT, '"input": 0.0', "it must be a mplug.SlotBuffer"),
}


@pytest.mark.parametrize(("old", "new", "message"), FAULTS.values(), ids=FAULTS)
def test_buffers_that_the_host_cannot_keep_are_refused(plant: Plant, old: str, new: str, message: str) -> None:
    plant("acme-delayed", old, new)
    with pytest.raises(UsageError, match=f"kernels/delayed.*{message}"):
        build_model(tiny_run(SETTINGS))


def test_a_wrap_that_passes_buffers_on_may_surround_their_supplier(plant: Plant) -> None:
    plant("acme-delayed", OFFER, WRAPPED.format(", passes_buffers=True"))
    assert build_model(tiny_run(SETTINGS)).slot_buffers


def test_ranks_that_declare_different_buffers_are_refused(plant: Plant) -> None:
    of_rank = "lambda site: {k: b for k, b in self.buffers(site).items() if run.rank == 0 or k != 'total'}"
    fewer = OFFER.replace("self.buffers", of_rank)
    plant("acme-delayed", "def offer(self)", "def offer(self, run: 'Run')", OFFER, fewer)
    said = r"ranks 0 and 1 have the same units, and different buffers '\S*gemm__total'"
    with pytest.raises(WorkerFailed, match=said):
        run_workers(2, train_steps, {**SETTINGS, "parallel.layout": "dp2"})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"reduction": "mean", "over": ("batch",)}, "is 'sum' or 'max', not 'mean'"),
        ({"reduction": "max"}, "it needs `over`"),
        ({"over": ("batch",), "value": 1.0}, "a sum starts a step at zero"),
        ({"shape": (3,)}, "needs 1 dims, not 0"),
        ({"over": "batch"}, "`over` of a buffer is a tuple, not 'batch'"),
    ],
)
def test_a_declaration_that_means_nothing_is_refused(wrong: Settings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SlotBuffer(**wrong)


def test_names_that_a_module_cannot_hold_are_refused() -> None:
    with torch.device("meta"):
        experts, layer = Experts(8, 16, 2, "gelu"), Linear(2, 2)
    with pytest.raises(ValueError, match="the name 'largest' must begin with 'up_' or 'down_', the weight's name"):
        hold(experts, slot_of(experts, "Experts.product"), {"largest": torch.zeros(())})
    hold(layer, slot_of(layer, "Linear.gemm"), {"kept": torch.zeros(())})
    with pytest.raises(ValueError, match="Linear already has an attribute 'gemm__kept'"):
        hold(layer, slot_of(layer, "Linear.gemm"), {"kept": torch.zeros(())})


def test_explain_shows_what_suppliers_keep_and_over_which_axes_it_is_reduced(plant: Plant, tiny: list[str]) -> None:
    plant("acme-delayed")
    words = ["explain", *tiny, "--kernels", "linear=delayed", "--parallel", "dp2tp2", "--data", "mock"]
    output = CliRunner().invoke(main, words).output
    table = output.partition("Buffers of suppliers\n")[2].partition("\n\n")[0]
    rows = {(words[0], words[4]): words[5:] for words in map(str.split, table.splitlines())}
    up, down = "blocks.*.mlp.up", "blocks.*.mlp.down"
    assert rows[up, "history"] == ["3x4", "3x4", "state", "-"]
    assert rows[up, "row_totals"] == ["128", "64", "sum", "over", "batch,", "sequence", "dp"]
    assert rows[up, "total"] == ["scalar", "scalar", "sum", "over", "batch,", "sequence,", "embed", "dp"]
    assert rows[down, "total"] == ["scalar", "scalar", "sum", "over", "batch,", "sequence,", "mlp", "dp,", "tp"]
    assert "buffers of suppliers" in output.partition("Bytes of rank 0")[2]


def held(step_ended: Any) -> HeldBuffers:
    """Two buffers of a layer: a maximum, and a state that starts at 2."""
    declared = {"largest": SlotBuffer(over=("batch",), reduction="max"), "kept": SlotBuffer((3,), ("item",), 2.0)}
    layer = Linear(2, 2, bias=False)
    hold(layer, slot_of(layer, "Linear.gemm"), {"largest": torch.tensor(5.0), "kept": torch.full((3,), 2.0)})
    offer = Offer({"Linear.gemm": Gemm()}, buffers=lambda _: declared, step_ended=step_ended, plugin="kernels/some")
    return HeldBuffers(Site("blocks.*.up", "Linear.gemm", layer, "blocks.0.up"), offer, declared)


def test_states_of_a_role_are_updated_together_and_a_skipped_step_changes_none() -> None:
    shapes = []

    def ended(stacked: Mapping[str, Tensor]) -> dict[str, Tensor]:
        shapes.append({name: tuple(value.shape) for name, value in stacked.items()})
        return {"kept": stacked["kept"] * stacked["largest"][:, None]}

    layers = [held(ended), held(ended)]
    (update,) = slot_updates(layers)
    for skip, expected in ((1.0, 2.0), (0.0, 10.0)):
        update(torch.tensor(skip))
        assert [one.tensors()["kept"].tolist() for one in layers] == [[expected] * 3] * 2
    assert shapes == [{"largest": (2,), "kept": (2, 3)}] * 2


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"largest": torch.zeros(1)}, "'largest', which is a statistic of the step"),
        ({"other": torch.zeros(1)}, "'other', which Offer.buffers does not declare"),
        ({"kept": torch.zeros(3)}, r"'kept' as torch.float32 of shape \(3,\); it must have torch.float32 and \(1, 3\)"),
    ],
)
def test_new_values_of_anything_but_states_are_an_error(returned: dict[str, Tensor], message: str) -> None:
    (update,) = slot_updates([held(lambda _: returned)])
    with pytest.raises(ValueError, match=f"kernels/some: step_ended of Linear.gemm returns {message}"):
        update(torch.tensor(0.0))


def test_a_maximum_of_a_model_begins_at_its_value_and_metrics_report_it() -> None:
    module = torch.nn.Module()
    module.register_buffer("largest", torch.zeros(2))
    plan = Plan((), {}, {}, {}, Flops(0, 0), buffers={"largest": Buffer(("item",), -3.0, ("batch",), reduction="max")})
    run = tiny_run({})
    described = Parameter(("item",), Init("constant", value=-3.0), ("batch",))
    statistics = Statistics(run, module, plan, {"largest": Placement("largest", described, (2,), run.mesh)})
    statistics.begin_step()
    for values in ([-5.0, 1.0], [-4.0, 0.5]):
        keep_max(module.get_buffer("largest"), torch.tensor(values))
    assert statistics.finish(torch.tensor(1.0), torch.tensor(1.0))["largest"].tolist() == [-3.0, 1.0]


def trained(settings: Settings, steps: int, directory: Path, resume_from: Path | None = None) -> list[float]:
    saving = {"trainer.eval_every": 0, "trainer.precision": "fp64", "checkpoint.asynchronous": False}
    config = tiny_config({**SETTINGS, **saving, **settings, "trainer.steps": steps})
    return runs.trained(config, directory, resume_from=resume_from).losses


@pytest.mark.wide("reshard")
def test_histories_resume_under_another_layout(plant: Plant, tmp_path: Path, logical: Any) -> None:
    plant("acme-delayed")
    (whole,) = run_workers(1, trained, {}, 4, tmp_path / "whole")
    run_workers(2, trained, {"parallel.layout": "tp2"}, 2, tmp_path / "begun")
    begun = newest(tmp_path / "begun" / "checkpoints")
    losses = run_workers(2, trained, {"parallel.layout": "pp2"}, 4, tmp_path / "resumed", begun)[0]
    assert losses == pytest.approx(whole[2:], rel=EXACT, abs=0)
    found, expected = (logical(newest(tmp_path / one / "checkpoints")) for one in ("resumed", "whole"))
    assert found.keys() == expected.keys()
    expected = {name: state for name, state in expected.items() if "gemm__" in name}
    assert len(expected) == 3 * 9, "three states of nine linear layers"
    for name, state in expected.items():
        assert bool(state.any())
        torch.testing.assert_close(found[name], state, rtol=1e-6, atol=0, msg=name)


def test_a_checkpoint_without_the_histories_serves_a_new_run_and_no_resumed_one(plant: Plant, tmp_path: Path) -> None:
    plant("acme-delayed")
    run_workers(1, trained, {"kernels.linear": None}, 1, tmp_path / "plain")
    plain = newest(tmp_path / "plain" / "checkpoints")
    run = tiny_run(SETTINGS)
    with pytest.raises(UsageError, match=r"no state '\S*gemm__history', which .* a kernel .* checkpoint.pretrained="):
        refuse_unsavable_states(run, build_model(run), plain)
    (losses,) = run_workers(1, trained, {"checkpoint.pretrained": str(plain)}, 2, tmp_path / "new")
    assert len(losses) == 2


@pytest.mark.wide("compile")
def test_compiled_units_keep_the_same_buffers(plant: Plant) -> None:
    plant("acme-delayed")
    found = run_workers(1, watched, {**SETTINGS, "trainer.compile": "aot_eager"})
    assert_same_run(found, reference())
    assert found[0].graphs == 6, "three kinds of units, to train and to evaluate"
