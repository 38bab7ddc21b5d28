"""`mplug plan`: the limits of a machine, predicted bytes and seconds, the search, and the page of a step."""

import json
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from mplug_plan import command
from mplug_plan.chips import machine_of
from mplug_plan.kernels import Kernels
from mplug_plan.machine import LAUNCH, Link, Load, Machine, Power
from mplug_plan.planned import Built, Planner
from mplug_plan.search import search
from mplug_plan.simulate import boxes_of, page_of
from mplug_plan.unit_costs import Costs

from mplug import UsageError
from mplug.commands import read_assignments
from mplug_estimates import measure_bytes
from mplug_testing import CommandSuite

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SMALL = (
    "model.num_layers=4 model.hidden_size=64 model.num_attention_heads=4 model.vocab_size=128 trainer.seq_length=32 "
    "trainer.global_batch_size=8 trainer.precision=bf16"
)
H100 = machine_of("h100", None, None, None)


def planner(words: str, gpus: int, machine: Machine = H100) -> Planner:
    return Planner(read_assignments(f"{SMALL} {words}".split(), "test"), machine, gpus)


def built(layout: str, gpus: int, words: str = "", machine: Machine = H100) -> Built:
    return planner(words, gpus, machine).built(layout, ("trainer.micro_batch_size=1",))


def shown(*words: str) -> Any:
    small = [word for one in SMALL.split() for word in ("--set", one)]
    return CliRunner().invoke(command, [*small, *words])


class TestPlan(CommandSuite):
    plugin = "plan"
    refused = (
        ("--gpu", "h300"),
        ("--limits", "nowhere.json"),
        ("--gpus", "4", "--parallel", "tp3"),
    )


# Limits.


def test_a_collective_takes_the_time_of_its_slowest_link() -> None:
    machine = replace(H100, node=Link(4e11, 0), pair=Link(2e11, 0), network=Link(5e10, 0))
    assert machine.collective(8e9, 8, 8) == pytest.approx(7 / 8 * 8e9 / 4e11)
    assert machine.collective(8e9, 2, 8) == pytest.approx(1 / 2 * 8e9 / 2e11)
    assert machine.collective(8e9, 16, 8) == pytest.approx(15 / 16 * 8e9 / 4e11)  # eight adapters
    assert machine.collective(8e9, 16, 1) == pytest.approx(15 / 16 * 8e9 / 5e10)
    assert machine.collective(8e9, 1, 1) == 0


def test_a_file_of_bench_replaces_the_built_in_limits(tmp_path: Path) -> None:
    rates = {
        "bfloat16 product of 1024 x 1024 matrices, TFLOP/s": 90.0,
        "bfloat16 product of 8192 x 8192 matrices, TFLOP/s": 600 * 8192 / (8192 + 200),
        "copy within memory, read and written, TB/s": 2.5,
        "attention forward and backward, TFLOP/s": 400.0,
        "all-gather of 1 MiB, bus GB/s": 2**20 / (1e-5 + 2**20 / 3e11) / 1e9,
        "all-gather of 128 MiB, bus GB/s": 2**27 / (1e-5 + 2**27 / 3e11) / 1e9,
    }
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"variants": {"": {"world_size": 8, "limits": {"rates": rates, "classes": {}}}}}))
    found = machine_of("h100", file, None, None)
    assert found.product_rate == pytest.approx(600e12 * 8192 / (8192 + 200) * (1 + H100.half_depth / 8192))
    assert (found.copy_rate, found.attention_rate, found.half_length) == pytest.approx((2.5e12, 4e14, 0))
    assert found.power is None, "the file has no clocks"
    assert (found.node.bytes_per_s, found.node.seconds) == pytest.approx((3e11, 1e-5))
    assert (found.pair, found.network) == (H100.pair, H100.network)
    rates["the model's own products, TFLOP/s"] = 500.0
    file.write_text(json.dumps({"variants": {"": {"world_size": 2, "limits": {"rates": rates, "classes": {}}}}}))
    found = machine_of("h100", file, None, None)
    assert 500e12 < found.product_rate < 550e12
    assert (found.node, found.pair.bytes_per_s) == (H100.node, pytest.approx(3e11))


def test_limits_by_shape_give_the_rates_that_made_them(tmp_path: Path) -> None:
    """Rates of a machine of known figures, at clocks of their own."""
    rates, clocks = {}, {}
    for kind, deep, depths in (("bfloat16", 8e14, (1024, 4096, 16384)), ("8-bit", 12e14, (1024, 8192))):
        for depth, clock in zip(depths, (1800.0, 1600.0, 1500.0), strict=False):
            name = f"{kind} product of 8192 x 8192 results, depth {depth}, TFLOP/s"
            clocks[name] = clock
            rates[name] = deep * depth / (depth + 300) * clock / 1500 / 1e12
    for length in (1024, 32768):
        rates[f"attention of {length} tokens, forward and backward, TFLOP/s"] = 600 * length / (length + 500)
    for name in ("norm of a sum", "gradient of an activation"):
        rates[f"{name}, read and written, TB/s"] = 3.0
    for name, rate, clock in (
        ("the model's own products, TFLOP/s", 700.0, 1500.0),
        ("attention forward and backward, TFLOP/s", 550.0, 1900.0),
        ("copy within memory, read and written, TB/s", 4.0, 1980.0),
    ):
        rates[name], clocks[name] = rate, clock
    watts = dict.fromkeys(clocks, 350.0)
    chip = {"power limit, W": 700.0, "largest clock, MHz": 1980.0}
    file = tmp_path / "bench.json"
    limits = {"rates": rates, "classes": {}, "clocks": clocks, "watts": watts, "chip": chip}
    file.write_text(json.dumps({"variants": {"": {"world_size": 1, "limits": limits}}}))
    found = machine_of("h200", file, None, None)
    assert (found.half_depth, found.speedup8, found.kernel_rate) == pytest.approx((300, 1.5, 3e12))
    assert (found.attention_rate, found.half_length) == pytest.approx((600e12, 500))
    assert found.power is not None
    assert (found.power.products.watts, found.power.memory.watts) == (700, 350), "lower clocks are due to the limit"


def test_a_step_keeps_to_the_power_limit_at_one_clock() -> None:
    power = Power(700, 1980, Load(1500, 700), Load(1900, 700), Load(1980, 350))
    assert power.clock(1.0, 0.0, 0.0) == pytest.approx(1500, rel=1e-3), "products alone have their own clock"
    assert power.clock(0.0, 1.0, 0.0) == pytest.approx(1900, rel=1e-3)
    assert power.clock(0.0, 0.0, 1.0) == 1980, "copies reach no limit"
    mixed = power.clock(0.7, 0.2, 0.1)
    assert 1500 < mixed < 1900, "so products are faster than alone, and attention is slower"
    assert power.clock(0.7, 0.2, 0.1) < power.clock(0.5, 0.2, 0.3)


def test_blocks_of_a_role_with_other_work_have_costs_of_their_own() -> None:
    """Two of four blocks of a hybrid have no attention of all pairs."""
    mixers = "model.name=qwen model.head_dim=16 model.linear_num_key_heads=2 model.linear_num_value_heads=4"
    one = built("", 1, f"{mixers} model.mixer_types=[gated_delta,attention,gated_delta,attention]")
    units = Costs(one.run, one.model, H100, Kernels()).units()
    seconds = [units[f"blocks.{number}"].seconds for number in range(4)]
    assert seconds[0] == seconds[2] != seconds[1] == seconds[3]
    assert one.planner.unknown == "the scans of 2 blocks of a stage"


def test_an_update_multiplies_matrices_and_fetches_offloaded_states() -> None:
    usual, muon, far = (
        built("", 1, words).planned(exact=True) for words in ("", "optimizer.name=muon", "optimizer.offload={}")
    )
    shared = built("zero2", 2, "optimizer.name=muon").planned(exact=True)
    assert muon.step.parts["update"] > usual.step.parts["update"]
    assert shared.step.parts["update"] < muon.step.parts["update"], "ranks share the matrices"
    assert far.step.parts["update"] > usual.step.parts["update"]
    assert not any("CPU" in kind for kind in far.held), "states in the memory of the CPU take none of the GPU"


def test_settings_that_only_gpus_serve_are_planned_without_one() -> None:
    with_graphs = planner("trainer.graphs=true parallel.cp.transport=copy_engines", 1)
    assert with_graphs.built("").planned().seconds > 0


def test_soft_caps_are_planned_without_a_gpu_as_a_kernel_of_gpus_keeps_them() -> None:
    """No pairs of positions are in memory, as with the default kernels of a GPU."""
    gemma = planner("model.name=gemma model.attention_soft_cap=50.0", 1).built("", ("trainer.micro_batch_size=1",))
    offers = [one.offer for one in gemma.model.slots if one.site.kind == "attention"]
    assert {(one.plugin, one.keeps_pairs) for one in offers if one is not None} == {("kernels/flex", False)}
    assert None not in offers


@pytest.mark.parametrize(
    ("chip", "text", "message"),
    [
        ("h300", None, "no limits of 'h300' are built in"),
        ("h100", "[]", "is not a file of 'mplug bench --limits --out FILE'"),
        ("h100", '{"variants": {"": {"world_size": 1}}}', "has no limits"),
        ("h100", '{"variants": {"": {"limits": {"rates": {"a": 1}}}}}', "FILE' (KeyError)"),
        ("h100", '{"variants": {"": {"world_size": 1, "limits": {"rates": {"a": 0}}}}}', "FILE' (ValueError)"),
    ],
)
def test_unknown_chips_and_other_files_are_refused(chip: str, text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "limits.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)):
        machine_of(chip, None if text is None else file, None, None)
    with pytest.raises(UsageError, match=r"none\.json' does not exist; write it by 'mplug bench --limits --out"):
        machine_of("h100", tmp_path / "none.json", None, None)


@pytest.mark.parametrize("option", ["--simulate", "--out"])
def test_a_file_in_a_folder_that_does_not_exist_is_refused_before_the_search(option: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["--gpus", "8", option, str(tmp_path / "none" / "file")])
    assert isinstance(result.exception, UsageError)
    assert f"cannot write {option}" in str(result.exception)
    assert "its folder does not exist" in str(result.exception)
    assert result.output == ""


def test_a_default_kernel_fills_the_kinds_that_it_offers_unless_one_is_left_to_plain_torch() -> None:
    found = Kernels.of({"default": "triton", "attention": "flash", "mlp": "quack"})
    assert (found.supplied, found.fuses_activation, found.attention) == ({"norm"}, True, 1.0)
    assert found.assumed == ("flash", "quack", "triton")
    assert Kernels.of({"default": "triton", "norm": None}).supplied == frozenset()
    assert Kernels.of({"default": "sdpa"}).assumed == ()
    listed = Kernels.of({"default": ["sdpa", "flash", "triton"]})
    assert (listed.attention, listed.supplied, listed.assumed) == (1.0, frozenset(), ("flash", "triton"))
    assert Kernels.of({"default": ["sdpa", "triton"], "attention": None}).attention == 1.0
    assert Kernels.of({"default": []}) == Kernels.of({"default": None})


# Bytes and seconds.


@pytest.mark.wide("layouts", quick=["zero2-", "tp2dp2-optimizer.name=muon", "pp2-"])
@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("", ""),
        ("tp2", ""),
        ("pp2", ""),
        ("zero2", ""),
        ("zero2", "parallel.zero.stage=2"),
        ("fsdp2", ""),
        ("tp2dp2", "optimizer.name=muon"),
    ],
)
def test_bytes_that_are_counted_fast_are_those_of_a_build(layout: str, words: str) -> None:
    """Only padding of buckets may differ."""
    gpus = 4 if layout == "tp2dp2" else 2 if layout else 1
    one = built(layout, gpus, words)
    if "muon" in words:
        exact = one.planned(exact=True).held
        one.planner.state_bytes = exact["optimizer state"] / (exact["masters"] / 4)
    counted, measured = one._counted(), measure_bytes(one.run, one.model)
    assert counted.keys() == measured.keys()
    for kind, size in measured.items():
        assert counted[kind] == pytest.approx(size, rel=0.01), kind


@pytest.mark.parametrize(("layout", "gpus"), [("", 1), ("tp2", 2), ("pp2", 2), ("fsdp2", 2), ("tp2pp2", 4)])
def test_products_of_all_ranks_take_the_flops_of_the_plan(layout: str, gpus: int) -> None:
    """On a machine whose memory is infinitely fast and whose products have no beginning and no end."""
    machine = replace(H100, half_depth=0, half_length=0, copy_rate=1e30)
    one = built(layout, gpus, machine=machine)
    units = Costs(one.run, one.model, machine, Kernels()).units().values()
    parts = [unit.seconds for unit in units]
    products = sum(part.products + part.input_gradients + part.weight_gradients for part in parts)
    number = 3 * sum(work.is_weight for work in one.model.plan.work or ())
    ranks = one.run.mesh.axes["tp"].size if "tp" in one.run.mesh.axes else 1
    flops = one.model.flops.per_token * 32
    assert (products - number * LAUNCH) * ranks == pytest.approx(flops / machine.product_rate)
    attention = sum(part.attention + part.attention_backward for part in parts)
    of_pairs = one.model.flops.of(32, 32**2) - flops
    assert attention * ranks == pytest.approx(of_pairs * (1 / 3 + 2.5 / 3) / machine.attention_rate)


def test_recomputed_units_run_their_forward_pass_twice_and_keep_less() -> None:
    machine = replace(H100, power=None)  # at the same clock
    plain, again = (
        planner("", 1, machine).built("", ("trainer.micro_batch_size=1", *more)).planned()
        for more in ((), ("memory.recompute.mode=full",))
    )
    assert again.memory < plain.memory
    (before,), (after,) = plain.step.chunks, again.step.chunks
    assert after.forward == before.forward
    assert before.backward < after.backward < before.backward + before.forward


def test_the_parts_of_a_step_add_up_and_larger_micro_batches_need_more_memory() -> None:
    one = planner("", 2).built("pp2")
    small, large = one.planned(1), one.planned(2)
    for planned in (small, large):
        assert sum(planned.step.parts.values()) == pytest.approx(planned.seconds)
        assert min(planned.step.parts.values()) >= 0
    assert small.memory < large.memory
    assert small.micro_batches == 2 * large.micro_batches


ROWS = {
    "1.7b": ("", 1, "model.preset=1.7b kernels.default=triton", 4, 51.3),
    "tp2": ("tp2", 2, "model.preset=7.1b kernels.default=triton parallel.tp.overlap=false", 4, 85.5),
    "zero2": ("zero2", 2, "model.preset=7.1b", 2, 104.4),
    "fsdp2": ("fsdp2", 2, "model.preset=7.1b kernels.default=triton model.position=learned "
              "model.max_position_embeddings=4096", 2, 80.3),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_memory_is_that_of_a_gpu_within_3_percent(row: str) -> None:
    """Peaks of H200s in docs/performance.md; `benchmarks/plan_rows.py` has all rows."""
    layout, gpus, words, size, measured = ROWS[row]
    samples = size * (gpus if layout[:2] in ("ze", "fs") else 1)
    words = f"{words} trainer.precision=bf16 trainer.global_batch_size={samples} trainer.micro_batch_size={size}"
    settings = read_assignments(words.split(), "test")
    settings |= read_assignments(["trainer.global_batch_size=8"], "test") if row == "zero2" else {}
    one = Planner(settings, H100, gpus).built(layout).planned()
    assert one.memory / 2**30 == pytest.approx(measured, rel=0.03)


# The search.


def test_the_fastest_layout_is_first_and_the_host_accepts_the_command(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = shown("--gpus", "8", "--out", str(out), "--top", "4")
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())["layouts"]
    seconds = [one["seconds"] for one in found]
    assert len(found) == 4
    assert seconds == sorted(seconds)
    for one in found:
        words = shlex.split(one["command"])
        assert words[:2] == ["mplug", "train"]
        assert one["command"] in result.output or found.index(one) >= 3
        settings = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
        settings += [f"parallel.layout={one['layout']}", "trainer.device=cpu", "trainer.compile=never"]
        accepted = Planner(read_assignments(settings, "test"), H100, 8).built(one["layout"])
        assert accepted.run.mesh.world_size == 8


def test_what_does_not_fit_and_what_the_host_refuses_is_named() -> None:
    none = shown("--gpus", "2", "--memory", "3.001")
    assert none.exit_code == 2
    assert "need more than 0.0 GiB, also with recomputation" in none.output
    found = search(planner("parallel.layout=pp2fsdp2", 4))
    assert [one.layout for one in found.fitting] == ["pp2fsdp2"]
    assert "this pipeline schedule computes weight gradients later" in found.refused["pp2fsdp2 with zb-h1"], (
        found.refused
    )
    wide = shown("--gpus", "8", "--parallel", "tp8")
    assert (wide.exit_code, "tp=8 does not divide the 4 heads" in str(wide.exception)) == (1, True), wide.output


def test_settings_of_the_user_stay_and_a_layout_of_the_user_is_the_only_one() -> None:
    words = "trainer.micro_batch_size=2 memory.recompute.mode=full parallel.layout=dp2"
    found = search(planner(words, 2))
    assert [one.layout for one in found.fitting] == ["dp2"]
    assert found.fitting[0].micro_batch_size == 2
    assert found.fitting[0].assignments == ()


@pytest.mark.wide("layouts")
def test_more_gpus_than_a_rack_are_planned_without_any() -> None:
    settings = "model.preset=177b trainer.precision=bf16 trainer.global_batch_size=1536 parallel.layout=tp8pp8zero48"
    one = search(Planner(read_assignments(settings.split(), "test"), H100, 3072)).fitting[0]
    assert one.gpus == 3072
    assert 10 < one.memory / 2**30 < 76
    assert 0.2 < one.mfu(H100.peak) < 0.8


# The page.


@pytest.mark.parametrize(("layout", "gpus"), [("pp2", 2), ("dp2", 2), ("tp2pp2", 4)])
def test_the_page_has_each_pass_once_and_ends_with_the_step(layout: str, gpus: int) -> None:
    one = built(layout, gpus).planned()
    boxes = boxes_of(one.step)
    assert max(box.stop for box in boxes) == pytest.approx(one.seconds)
    passes = [box for box in boxes if "micro batch" in box.title]
    stages = 1 + max(box.stage for box in boxes)
    assert len(passes) == 2 * one.micro_batches * stages
    for stage in range(stages):
        own = sorted((box.start, box.stop) for box in passes if box.stage == stage)
        assert all(before[1] <= after[0] + 1e-12 for before, after in pairwise(own))
    page = page_of(one, H100)
    (picture,) = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    rectangles = [part for part in ElementTree.fromstring(picture) if part.tag.endswith("rect")]
    assert len(rectangles) == len(boxes)
    assert all(len(part) == 1 for part in rectangles), "each has a title"
    assert not re.search(r"""(src|href)\s*=|@import|url\(""", page)


@pytest.mark.wide("site")
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")
def test_a_browser_draws_the_page(tmp_path: Path) -> None:
    file = tmp_path / "step.html"
    file.write_text(page_of(built("pp2", 2).planned(), H100))
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}")
    words = [str(BROWSER), *options, "--virtual-time-budget=2000", "--dump-dom", file.as_uri()]
    dumped = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout
    assert 'data-drawn="yes"' in dumped
