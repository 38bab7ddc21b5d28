"""LoRA keeps the contract of adapters; only adapters have states; what cannot work is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from layout_words import COMPILING
from mplug_lora.dropout import wraps

from mplug import UsageError
from mplug.cli import main
from mplug.model.build import build_model
from mplug.run.prepare import prepare
from mplug_estimates import measure_bytes
from mplug_pretrained.adapter_files import adapters_of
from mplug_saving.changes import changes_on_resume
from mplug_saving.folder import newest, read_manifest
from mplug_testing import AdapterSuite, run_workers
from mplug_testing.harness import EXACT, difference, tiny_config, tiny_run, train_ranks
from mplug_testing.parity import require_parity
from mplug_testing.runs import trained

LORA = {"adapters.lora.rank": 3, "adapters.lora.alpha": 5.0, "model.num_layers": 2}
SHAPE: dict[str, Any] = {
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 2,
    "model.vocab_size": 259,
    "model.init_std": 0.06,
}
EXPERTS: dict[str, Any] = {
    **SHAPE,
    "model.name": "mixtral",
    "model.num_experts": 4,
    "model.num_experts_per_token": 2,
    "model.moe_ffn_hidden_size": 24,
    "model.moe_balance": "none",
    "model.aux_loss_coefficient": 0.0,
}
SMALL: dict[str, Any] = {**LORA, **SHAPE, "model.name": "llama", "model.ffn_hidden_size": 48}
ALL = {"adapters.lora.targets": ["linear", "experts"]}
SHARED = {**EXPERTS, "adapters.lora.targets": ["experts"], "adapters.lora.experts": "shared"}
MIXTRAL = {**EXPERTS, **ALL, "model.ffn_hidden_size": 24}
COPIES = "parallel.tp.sequence_parallel=false"
DORA = {**SMALL, "adapters.lora.dora": True}


class TestLoRA(AdapterSuite):
    plugin = "lora"
    settings = SMALL
    models = {"experts": {**EXPERTS, **ALL}, "dora": DORA}
    layouts = ("tp2",)
    examples = {"experts": ["shared"], "targets": [["attention"], ["qkv"]]}
    beside = {"experts": {**EXPERTS, "adapters.lora.targets": ["experts"]}}
    without_effect = {
        "path": "a run loads the folder before its first step (tests/test_adapting.py begins with one)",
        "base": "a name in folders of PEFT (test_fields.py reads and writes it)",
    }
    test_replayed_steps_are_steps = pytest.mark.wide("suites")(AdapterSuite.test_replayed_steps_are_steps)


ZB_V = pytest.param("zb-v", 4, marks=pytest.mark.wide("layouts"))


@pytest.mark.wide("layouts")
@pytest.mark.parametrize(("schedule", "layers"), [("zb-h1", 2), ZB_V])
def test_what_is_recomputed_in_a_backward_of_two_halves_is_what_ran(schedule: str, layers: int) -> None:
    """An adapter whose weight gradients are postponed computes in another way than one whose are not."""
    layout = f"pp2 parallel.pp.schedule={schedule} memory.recompute.mode=full"
    require_parity({**SMALL, "model.num_layers": layers}, layout)


@pytest.mark.wide("families")
def test_an_mlp_without_a_gate_has_adapters_in_a_family_whose_public_form_has_one() -> None:
    """The public form of a gated MLP has two tensors for the up projection, and this MLP's has one part."""
    require_parity({**SMALL, "model.activation": "relu2"}, "tp2")


@pytest.mark.parametrize("layout", [f"tp2ep2 {COPIES}"])
def test_an_adapter_that_experts_share_has_the_gradient_of_one_process(layout: str) -> None:
    require_parity({**SHARED, **LORA}, layout)


@pytest.mark.wide("layouts")
@pytest.mark.parametrize("layout", ["tp2", f"tp2 {COPIES}"])
def test_dora_with_dropout_of_whole_inputs_under_tp_is_that_of_one_process(layout: str) -> None:
    whole = {"adapters.lora.targets": ["qkv", "up"], "adapters.lora.dropout": 0.2}
    require_parity({**DORA, **whole}, layout)


@COMPILING
@pytest.mark.wide("compile")
def test_recomputed_attention_of_adapted_projections_compiles_to_the_eager_run() -> None:
    """Tracing creates the values, a part of the adapted projection, in the recomputed region."""
    settings = {**SMALL, "model.num_layers": 1, "memory.recompute.mode": "selective"}
    (eager,), (compiled,) = (train_ranks(1, {**settings, "trainer.compile": one}) for one in ("never", "aot_eager"))
    assert difference([compiled], eager) == ""


def test_only_adapters_have_gradients_masters_and_optimizer_states() -> None:
    run = tiny_run({**SMALL, "trainer.precision": "bf16"})
    model = build_model(run)
    adapters = sum(one.numel() for name, one in model.parameters().items() if ".adapter." in name)
    rest = sum(one.numel() for one in model.parameters().values()) - adapters
    sizes = measure_bytes(run, model)
    assert sizes["weights"] == 2 * adapters
    assert sizes["frozen weights"] == 2 * rest
    assert sizes["masters"] == 4 * adapters
    assert sizes["gradients"] == 4 * adapters
    steps = 4 * len(model.attached) * 8  # at most: a counter for each tensor
    assert 8 * adapters <= sizes["optimizer state"] <= 8 * adapters + steps


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"adapters.lora.targets": ["q_prj"]}, "adapters.lora.targets: 'q_prj' names no linear layer of this model"),
        ({"adapters.lora.targets": ["experts"]}, "'experts' names no linear layer of this model"),
        ({"adapters.lora.rank": 17}, "rank=17 is above the width 16 of 'model.layers.0.self_attn.k_proj'"),
        (
            {"adapters.lora.dropout": 0.1, "parallel.layout": "tp2"},
            "dropout: tp divides the inputs of 'blocks.0.attn.out'",
        ),
        ({"adapters.lora.experts": "shared"}, "adapters.lora.experts=shared: adapters.lora.targets names no experts"),
        ({**MIXTRAL, "adapters.lora.dora": True}, "adapters.lora.dora does not apply to the adapters of experts"),
    ],
    ids=str,
)
def test_what_cannot_be_adapted_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_model(tiny_run({**SMALL, **LORA, **settings}))
    assert said in str(caught.value)


def test_dropout_in_a_unit_that_receives_no_keys_is_refused() -> None:
    run = tiny_run(SMALL)
    model = build_model(run)
    model.own_units = tuple(replace(unit, inputs=("x",)) for unit in model.own_units)
    with pytest.raises(UsageError, match=r"unit 'blocks\.0' has adapters and does not receive 'keys'"):
        wraps(run, model)


def test_an_adapter_that_experts_share_is_one_pair_that_is_merged_into_each_and_not_published() -> None:
    model = build_model(tiny_run({**SHARED, **LORA}))
    shapes = {
        name: tuple(one.shape) for name, one in model.parameters().items() if "0.moe" in name and "adapter" in name
    }
    place = "blocks.0.moe.experts"
    assert shapes == {
        f"{place}.up_adapter.a": (1, 3, 32),
        f"{place}.up_adapter.b": (1, 48, 3),
        f"{place}.down_adapter.a": (1, 3, 24),
        f"{place}.down_adapter.b": (1, 32, 3),
    }
    merge = model.merges[f"{place}.up"]
    values = {name: torch.randn(model.parameters()[name].shape) for name in merge.inputs}
    merged, (weight, a, b) = merge.compute(*values.values()), values.values()
    for expert in range(4):
        assert torch.allclose(merged[expert], weight[expert] + 5 / 3 * b[0] @ a[0], atol=1e-6)
    with pytest.raises(UsageError, match="shared has one for all experts"):
        adapters_of(model)


def test_a_folder_without_adapters_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "--adapt", "lora", "--set", "adapters.lora.path=nowhere", "--set", "trainer.steps=1"]
    refused = CliRunner().invoke(main, words)
    assert refused.exit_code == 2
    assert "adapter_config.json" in refused.output + str(refused.exception)
    assert not (tmp_path / "runs").exists()


def test_explain_and_the_start_of_a_run_say_that_peft_cannot_express_its_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {**SHARED, "trainer.seq_length": 16, "trainer.steps": 1, "trainer.device": "cpu", "data.name": "mock"}
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    reason = "refuse this run: PEFT has an A and a B for each expert, and adapters.lora.experts=shared has one for all"
    for command, said in (("explain", reason.replace("refuse", "refuses")), ("train", f"will {reason}")):
        done = CliRunner().invoke(main, [command, *words])
        assert done.exit_code == 0, done.output
        assert f"'mplug checkpoint export --to peft' {said}" in done.output
    plain = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    explained = CliRunner().invoke(main, ["explain", *plain]).output
    assert "'mplug checkpoint export --to peft' writes 28 tensors" in explained


def test_beside_fp8_products_of_the_model_follow_the_recipe_and_those_of_adapters_do_not() -> None:
    settings = {"trainer.precision": "fp8", "kernels.linear": "fp8", "adapters.lora.rank": 3}
    model = build_model(tiny_run(settings))
    found = {one.site.name: one.supplier for one in model.slots if one.site.slot == "Linear.product"}
    assert found["blocks.1.attn.qkv"] == "kernels/fp8"
    assert found["blocks.1.attn.qkv.adapter.a"] == found["blocks.1.attn.qkv.adapter.b0"] == "plain torch"


# Resumes under another layout, and with other adapters.

STEPS = 3
SAVED: dict[str, Any] = {
    "trainer.eval_every": 0,
    "trainer.precision": "fp64",
    "checkpoint.asynchronous": False,
    "model.num_layers": 2,
    "adapters.lora.rank": 3,
    "adapters.lora.dora": True,
}


def rank_of_a_run(layout: str, steps: int, directory: Path, resume_from: Path | None) -> list[float]:
    config = tiny_config({**SAVED, "parallel.layout": layout, "trainer.steps": steps})
    return trained(config, directory, resume_from=resume_from).losses


def losses_of(layout: str, steps: int, directory: Path, resume_from: Path | None = None) -> list[float]:
    found: list[float] = run_workers(2 if layout else 1, rank_of_a_run, layout, steps, directory, resume_from)[0]
    return found


@pytest.mark.wide("reshard")
def test_adapters_resume_under_another_layout(tmp_path: Path) -> None:
    reference = losses_of("", STEPS, tmp_path / "reference")
    before = losses_of("tp2", 1, tmp_path)
    after = losses_of("fsdp2", STEPS, tmp_path, newest(tmp_path / "checkpoints"))
    assert [*before, *after] == pytest.approx(reference, rel=EXACT)


@pytest.mark.parametrize(("before", "after"), [(None, 3), (3, None), (3, 4)], ids=["added", "dropped", "changed"])
def test_a_resumed_run_keeps_its_adapters(before: int | None, after: int | None, tmp_path: Path) -> None:
    plain = {"trainer.eval_every": 0, "trainer.steps": 1, "model.num_layers": 2, "checkpoint.asynchronous": False}
    first, second = ({**plain, **({"adapters.lora.rank": one} if one else {})} for one in (before, after))
    trained(tiny_config(first), tmp_path)
    path = newest(tmp_path / "checkpoints")
    with pytest.raises(UsageError, match=r"adapters\.lora\.rank" if before and after else r"adapters\.lora"):
        changes_on_resume(path, read_manifest(path), prepare(tiny_config(second)), ())
