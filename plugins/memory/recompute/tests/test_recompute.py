"""Recomputation and offload pass the suite, run what they should run again, and their tests have teeth.

`pytest --wide layouts` compares runs under every layout.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from mplug_recompute.again import checkpoint
from torch.nn import functional

from mplug import UsageError
from mplug.model.build import build_model
from mplug.training.assembly import build
from mplug_testing import Fault, MemorySuite
from mplug_testing.harness import tiny_config, tiny_run, train_steps
from mplug_testing.memory import kept_bytes, require_same

DROPOUT = {"model.dropout": 0.1, "model.attention_dropout": 0.1}
EXPERTS: dict[str, Any] = {
    **tiny_models.EXPERTS,
    "model.ffn_hidden_size": 32,
    "model.aux_loss_coefficient": 0.1,
    "model.moe_router_jitter": 0.1,
    "model.expert_bias_rate": 0.05,
}
DIVIDED = ("zero2 parallel.zero.stage=2", "fsdp2")
EVERY_LAYOUT = ("tp2", "tp2 parallel.tp.sequence_parallel=false", "pp2", "dp2", "tp2pp2", "dp2tp2", *DIVIDED)
CP = "cp2 model.attention_dropout=0"  # it refuses dropout of attention


def settings_of(**fields: Any) -> dict[str, Any]:
    return {f"memory.recompute.{name}": value for name, value in fields.items()}


class Recompute(MemorySuite):
    plugin = "recompute"
    compilers = ()
    checks_fields = False


@pytest.mark.wide("compile", tests=["test_a_compiled_run_with_it_is_the_run_without_it"])
class TestFull(Recompute):
    checks_fields = True
    compilers = MemorySuite.compilers
    settings = DROPOUT
    layouts = ("fsdp2",)
    examples = {"slots": [["activation"]], "offload_from": [0], "offload_every": [2]}
    beside = {
        "slots": settings_of(mode="selective"),
        "offload_from": settings_of(offload=True),
        "offload_every": settings_of(offload=True, offload_from=0),
    }


class TestFullOfExperts(Recompute):
    settings = EXPERTS


@pytest.mark.wide("layouts")
class TestFullUnderEveryLayout(TestFull):
    checks_fields = False
    models = {"experts": EXPERTS}
    layouts = (CP, *EVERY_LAYOUT)


class TestSelective(Recompute):
    settings = {**DROPOUT, **settings_of(mode="selective", slots=["attention", "activation"])}


class TestSelectiveOfExperts(Recompute):
    settings = {**EXPERTS, **settings_of(mode="selective", slots=["norm", "experts", "dispatch"])}
    layouts = ("ep2",)


class TestOffload(Recompute):
    settings = {**DROPOUT, **settings_of(mode="none", offload=True, offload_from=0)}


@pytest.mark.wide("layouts")
class TestOffloadUnderEveryLayout(TestOffload):
    compilers = ("aot_eager",)
    layouts = (CP, *EVERY_LAYOUT)


class TestOffloadOfInputs(Recompute):
    precisions = ("bf16",)
    settings = {**EXPERTS, **settings_of(offload=True, offload_from=0)}


@pytest.mark.wide("layouts")
class TestOffloadOfInputsUnderEveryLayout(TestOffloadOfInputs):
    compilers = ("aot_eager",)
    precisions = ("fp32", "bf16")
    layouts = ("ep2", "cp2", *EVERY_LAYOUT)


def test_a_loss_in_the_middle_of_the_model_is_recomputed() -> None:
    """Multi-token prediction computes a loss in a unit before the last one."""
    model = {"model.name": "llama", "model.num_layers": 1, "model.num_mtp_layers": 2, "model.vocab_size": 259}
    model |= {"model.hidden_size": 32, "model.num_attention_heads": 4, "model.ffn_hidden_size": 48}
    require_same([train_steps({**model, **settings_of(mode="full")})], [train_steps(model)])


# What is run again, and what stays.


@pytest.mark.parametrize(
    ("fields", "wrapped"),
    [
        ({"mode": "full"}, ["embedding", *(f"blocks.{n}" for n in range(4))]),
        ({"every": 2}, ["embedding", "blocks.1", "blocks.3"]),
        ({"first": 2}, ["embedding", "blocks.0"]),
        ({"first": 4, "every": 3}, ["embedding", "blocks.2"]),
        ({"first": 2, "every": 2}, ["embedding"]),
        ({"mode": "none"}, []),
    ],
)
def test_every_and_first_choose_units_and_the_last_unit_is_never_chosen(
    fields: dict[str, Any], wrapped: list[str]
) -> None:
    assert [filled.site.name for filled in build_model(tiny_run(settings_of(**fields))).unit_wraps] == wrapped


def test_offload_every_offloads_every_nth_chosen_unit() -> None:
    settings = settings_of(mode="full", first=4, offload=True, offload_every=2)
    wraps = {filled.site.name: len(filled.wraps) for filled in build_model(tiny_run(settings)).unit_wraps}
    assert wraps == {"embedding": 2, "blocks.0": 1, "blocks.1": 2, "blocks.2": 1}


def test_the_more_is_recomputed_the_less_memory_is_kept() -> None:
    kept = {
        name: kept_bytes(run := tiny_run(settings), build(run))
        for name, settings in {
            "nothing": {},
            "the attention core": {**settings_of(mode="selective"), "kernels.default": None},
            "every second unit": settings_of(every=2),
            "every unit": settings_of(mode="full"),
            "every unit, offloaded": settings_of(offload=True, offload_from=0),
        }.items()
    }
    assert sorted(kept.values(), reverse=True) == list(kept.values()), kept
    assert len(set(kept.values())) == len(kept), kept


def test_selective_recomputation_runs_a_slot_again_and_nothing_else() -> None:
    run = tiny_run({**settings_of(mode="selective"), "kernels.default": None})
    parts, calls = build(run), Counter[str]()
    run.step = 1

    def counting(inner: Callable[..., Any], name: str) -> Callable[..., Any]:
        return lambda *arguments, **named: calls.update([name]) or inner(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((functional, "rms_norm"), (torch, "einsum"), (functional, "layer_norm")):
            patch.setattr(module, name, counting(getattr(module, name), name))
        parts.stepper.forward_backward(parts.train_loader.take(2), 1)
    # Two products a core, in four blocks, twice.
    assert calls == {"einsum": 4 * 2 * 2, "layer_norm": 2 * 4 + 1, "rms_norm": 2 * 4}


def test_slots_that_are_misspelt_absent_or_not_recomputable_are_refused() -> None:
    for slots, reason in (
        (["atention"], "did you mean 'attention'"),
        (["experts"], "the model has no slot 'experts' .*remove 'experts'"),
        (["linear"], "recomputing 'Linear.product' frees no memory"),
        (["Experts.product"], "recomputing 'Experts.product' frees no memory"),
        ([], "is empty"),
    ):
        with pytest.raises(UsageError, match=reason):
            build_model(tiny_run(settings_of(mode="selective", slots=slots)))


def test_adapters_with_dropout_are_not_run_again_while_other_micro_batches_are_in_flight() -> None:
    """They would draw the masks of the last one."""
    settings = {
        "adapters.lora.rank": 2,
        "adapters.lora.dropout": 0.1,
        "memory.recompute.mode": "selective",
        "memory.recompute.slots": ["mlp"],
    }
    build_model(tiny_run(settings))
    with pytest.raises(UsageError, match=r"cannot serve MLP\.core .*set memory\.recompute\.mode=full"):
        build_model(tiny_run({**settings, "parallel.layout": "pp2"}))
    build_model(tiny_run({**settings, "parallel.layout": "pp2", "memory.recompute.mode": "full"}))
    build_model(tiny_run({**settings, "parallel.layout": "pp2", "memory.recompute.slots": ["attention", "activation"]}))


def test_offload_every_without_offload_is_refused() -> None:
    with pytest.raises(UsageError, match=r"offload_every has no effect without memory\.recompute\.offload=true"):
        build_model(tiny_run(settings_of(mode="full", offload_every=2)))


def test_the_flag_recompute_sets_the_mode() -> None:
    from mplug.cli.options import added_flags

    assert added_flags()["recompute"].target == "memory.recompute.mode"
    assert "recompute" not in added_flags({"recompute"}), "the host's options come first"
    assert tiny_config(settings_of(mode="none")).chosen[-1].label == "memory/recompute"


# The suite has teeth.


def _runs_another_forward(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    def other(inner: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        def moved(*given: Any, **more: Any) -> Any:
            in_backward = torch._C._current_graph_task_id() != -1
            return inner(*(x * 1.01 if in_backward and x.is_floating_point() else x for x in given), **more)

        return checkpoint(moved, *arguments, **named)

    return other


def _draws_other_numbers(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **named: checkpoint(*arguments, **{**named, "preserve_rng_state": False})


CHECKPOINT = "mplug_recompute.again.checkpoint"


def compared(suite: MemorySuite) -> None:
    suite.test_a_run_with_it_is_the_run_without_it("experts", "fp32")
    suite.test_what_a_kernel_draws_is_drawn_again("experts")
    suite.test_less_stays_on_the_device("experts")


@pytest.mark.parametrize(
    ("name", "fault", "words"),
    [
        ("torch._C._current_graph_task_id", lambda: -1, "is a recomputed result counted twice"),
        (CHECKPOINT, _runs_another_forward(checkpoint), "has other bits|the norm of step"),
        (CHECKPOINT, _draws_other_numbers(checkpoint), "differs if a kernel draws from torch's generator"),
        ("mplug_recompute.again.recomputed", lambda inner: inner, "bytes on the device"),
    ],
    ids=["twice", "another", "numbers", "kept"],
)
@pytest.mark.wide("suites", quick=["another"])
def test_the_suite_catches(monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., Any], words: str) -> None:
    monkeypatch.setattr(name, fault)
    with pytest.raises(Fault, match=words):
        compared(TestFullUnderEveryLayout())


# On a GPU.


def peak_of_a_pass(settings: dict[str, Any]) -> int:
    """By how many bytes a forward and backward pass exceeds what is allocated before it."""
    run = tiny_run(settings)
    parts = build(run)
    batches = list(parts.train_loader.take(run.config.trainer.global_batch_size))
    parts.stepper.forward_backward(batches, 1)  # what is made once
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    parts.stepper.forward_backward(batches, 2)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
def test_offload_on_a_gpu_gives_the_same_bits_and_holds_less() -> None:
    own = {"trainer.device": "cuda", "trainer.precision": "bf16", "model.hidden_size": 512, "model.num_layers": 8}
    own |= {"trainer.seq_length": 512, "trainer.deterministic": True}
    away = {**own, **settings_of(mode="none", offload=True, offload_from=1 << 16)}
    require_same([train_steps(away)], [train_steps(own)])
    assert peak_of_a_pass(away) < peak_of_a_pass(own)
