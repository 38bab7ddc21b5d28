"""Silent errors that Megatron-LM's issue 7452 and issues of Megatron-LM and torchtitan report, as cases of ours.

docs/conformance.md states each failure, and which parts of issue 7452 we could read. "Megatron 3" is its finding 3.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conformance import (
    DEEPSEEK,
    FULL_RECOMPUTE,
    GPT_OSS,
    WHOLE_STREAM,
    Settings,
    alone,
    error_of,
    gradients,
    norm_of,
    ranks_of,
    require_equal,
)
from tiny_models import DECODER, EXPERTS
from torch import Tensor
from torch.nn import functional as F

from mplug.training.assembly import Parts, build
from mplug_testing import run_workers
from mplug_testing.harness import EXACT, Trace, in_fp64, tiny_run, train_ranks, train_steps, unevenly
from mplug_testing.parity import trained_once

WIDE = pytest.mark.wide("layouts")
RELATIVE = 1e-9
"""The bound of an error relative to one parameter's own gradient, which may be much smaller than the global norm."""
ROUTER = "*.moe.router.weight"
BIASES = ("*.attn.out.bias", "*.moe.down_bias", "*.moe.experts.up_bias")
TIED: Settings = {**DECODER, "model.name": "llama", "model.tie_embeddings": True}
TIED_AHEAD: Settings = {**TIED, "model.num_layers": 4, "model.num_mtp_layers": 1}
INTERLEAVED: Settings = {"parallel.pp.schedule": "interleaved"}
PACKED: Settings = {**DECODER, "model.name": "qwen", "data.documents": 5}
"""Qwen 3's decoder with five documents of random lengths in every sample of 16 tokens."""
BALANCED: Settings = {**EXPERTS, "model.aux_loss_coefficient": 0.1, "model.expert_bias_rate": 0.5}
"""The bias moves far enough to change the second step's choices."""


class Case(NamedTuple):
    """A run under a layout, with options that change nothing of what is computed.

    The gradients that match `patterns` are compared each relative to its own norm.
    """

    layout: str
    settings: Settings
    options: Settings = {}
    patterns: tuple[str, ...] = ()
    wide: bool = False


CASES = {
    "Megatron 3, 1647 and 3672, torchtitan 3392": Case("dp2cp2", DEEPSEEK, patterns=("ahead.*", ROUTER)),
    "Megatron 3672, three strategies": Case("dp2tp2cp2", DEEPSEEK, patterns=(ROUTER,), wide=True),
    "Megatron 10, B1 and 1446": Case("tp2", DEEPSEEK, patterns=(ROUTER, "blocks.*", "head.norm.weight")),
    "Megatron 10, whole stream": Case("tp2", DEEPSEEK, WHOLE_STREAM, (ROUTER,)),
    "Megatron 11": Case("tp2", {}, WHOLE_STREAM, ("*.attn.[qk]_norm",)),
    "torchtitan 2252": Case("fsdp2", TIED),
    **{f"torchtitan 2252, {layout}": Case(layout, TIED, wide=True) for layout in ("tp2", "zero2", "fsdp2tp2")},
    "torchtitan 1524 and 2972": Case("pp2", TIED, patterns=("*",)),
    "torchtitan 1524, three uses": Case("pp2", TIED_AHEAD, INTERLEAVED, wide=True),
    "torchtitan 1612": Case("pp2", PACKED),
    "torchtitan 3392, pipeline": Case("pp2", DEEPSEEK),
    "torchtitan 771": Case("cp2fsdp2pp2", PACKED, wide=True),
    "torchtitan 2536": Case("cp4", PACKED, {"parallel.cp.method": "ring"}),
    "torchtitan 2536, all_gather": Case("cp4", PACKED, {"parallel.cp.method": "all_gather"}, wide=True),
    "torchtitan 2536, ulysses": Case("cp4", PACKED, {"parallel.cp.method": "ulysses"}, wide=True),
    "torchtitan 2446": Case("cp2tp2", PACKED),
    "torchtitan 4245": Case("tp2etp2", GPT_OSS, patterns=BIASES),
    **{f"torchtitan 4245, {one}": Case(one, GPT_OSS, patterns=BIASES, wide=True) for one in ("tp2", "etp2", "tp2ep2")},
    "torchtitan 2387": Case("tp2ep2", BALANCED, patterns=(ROUTER, "*.moe.experts.*")),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=WIDE if case.wide else []) for name, case in CASES.items()])
@pytest.mark.wide("layouts", quick=["torchtitan 1524 and 2972"])
def test_a_run_is_that_of_one_process(name: str) -> None:
    layout, settings, options, patterns, _ = CASES[name]
    traces, reference = ranks_of(layout, settings, options), alone(settings)
    for pattern in patterns:
        assert error_of(traces, reference, pattern) < RELATIVE
    require_equal(traces, reference)


def targets_of_step(ranks: int) -> list[int]:
    """The numbers of targets of the first step's samples on each data-parallel rank, as `train_steps` masks them."""
    run = tiny_run({**DEEPSEEK, "parallel.layout": f"dp{ranks}"})
    per_rank = run.config.trainer.global_batch_size // ranks
    ignored = [number % 11 for number in range(run.config.trainer.global_batch_size)]
    length = run.config.trainer.seq_length
    return [per_rank * length - sum(ignored[rank * per_rank : (rank + 1) * per_rank]) for rank in range(ranks)]


@pytest.mark.wide("layouts")
def test_the_cases_have_what_their_errors_need() -> None:
    first, second = targets_of_step(2)
    assert first / second > 1.2, "Megatron 3: ranks differ in their numbers of targets"
    assert len(alone(DEEPSEEK).statistics[0]["ahead.losses"]) == 2, "Megatron 1647: depths"
    settings = {**DEEPSEEK, "model.aux_loss_coefficient": 0.0, "model.z_loss_coefficient": 0.0}
    plain, whole = (gradients([one], one, "blocks.1.moe.router.weight") for one in (alone(settings), alone(DEEPSEEK)))
    ((name, right),) = whole.items()
    assert float((right - plain[name]).norm()) > 0.01 * float(right.norm()), "Megatron 10: routers have losses"
    assert alone(TIED).shapes.keys() >= {"embedding.token.weight"}
    assert "head.project.weight" not in alone(TIED).shapes, "torchtitan 2252: one parameter"
    assert tiny_run({**TIED, "parallel.layout": "pp2"}).micro_batch_counts()[0] == 4, "torchtitan 2972"
    batches = build(tiny_run(in_fp64(PACKED))).train_loader.take(8)
    lengths = torch.cat([batch["document_lengths"] for batch in batches])
    assert bool((lengths % 8 != 0).any(dim=1).all()), "torchtitan 2536: documents that do not divide by 2 cp"
    unbiased = alone({**BALANCED, "model.expert_bias_rate": 0.0})
    assert unbiased.losses[1] != pytest.approx(alone(BALANCED).losses[1], rel=1e-6), "torchtitan 2387: choices change"


def test_the_comparison_sees_a_part_that_is_left_out() -> None:
    """A gradient that one rank's half is missing of, as in Megatron 8 and 11, is far beyond the bound."""
    reference = alone({})
    halved = {
        name: [(start, values * (0.5 if name.endswith("q_norm") else 1)) for start, values in boxes]
        for name, boxes in reference.gradients[0].items()
    }
    wrong = replace(reference, gradients=[halved, *reference.gradients[1:]])
    assert error_of([wrong], reference, "*.attn.q_norm") == pytest.approx(0.5)
    with pytest.raises(AssertionError, match="q_norm"):
        require_equal([wrong], reference)


# The loss over a divided vocabulary.

LOGITS, LABEL = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64), 3


def loss_of(gathered: bool) -> tuple[float, list[float]]:
    """Be one rank: the loss of one token and its gradient, from this rank's half of the logits or from all of them."""
    import torch.distributed as dist
    from mplug_tp.vocabulary import VocabularyParallel

    own = (LOGITS if gathered else LOGITS.chunk(2)[dist.get_rank()]).clone().requires_grad_()
    vocabulary = VocabularyParallel(dist.group.WORLD, len(LOGITS))
    total, count = vocabulary.cross_entropy(torch.zeros(1, 1, 1), lambda _: own[None, None], torch.tensor([[LABEL]]))
    total.backward()
    assert int(count) == 1
    assert own.grad is not None
    return total.item(), own.grad.tolist()


@pytest.mark.parametrize("gathered", [False, True], ids=["Megatron 1", "Megatron 2"])
@pytest.mark.wide("layouts", quick=["Megatron 1"])
def test_every_rank_has_the_loss_of_the_whole_vocabulary(gathered: bool) -> None:
    """By hand: log(1 + e^-1 + e^-2 + e^-3). Gathered logits are not counted once a rank: what is beyond is padding."""
    (first, left), (second, right) = run_workers(2, loss_of, gathered)
    assert first == second == pytest.approx(0.44018969856119533, rel=1e-15)
    logits = LOGITS.clone().requires_grad_()
    F.cross_entropy(logits[None], torch.tensor([LABEL])).backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx([0.0321, 0.0871, 0.2369, -0.3561], abs=5e-5), "those of the issue"
    found = [one + other for one, other in zip(left, right, strict=True)] if gathered else left + right
    assert found == pytest.approx(logits.grad.tolist(), rel=1e-14)


# A group that is not the one of the layout.


def distant(settings: Settings) -> tuple[Trace, tuple[int, ...]]:
    """Be one rank of a run whose tensor-parallel ranks are the farthest from each other: (trace, the group's ranks)."""
    from mplug_tp import TensorParallel

    from mplug import hookimpl

    original = TensorParallel.mesh_axes

    @hookimpl
    def mesh_axes(self: Any, config: Any) -> list[Any]:
        return [replace(axis, distance=1000) for axis in original(self, config)]

    TensorParallel.mesh_axes = mesh_axes
    run = tiny_run(settings)
    return train_steps(settings), tuple(run.mesh.group(run.rank, "tp"))


@pytest.mark.wide("layouts")
def test_megatron_4_to_7_groups_are_those_of_the_layout() -> None:
    """Recomputed tokens ahead, what is divided with tokens, projections of attention, scattered embeddings."""
    found = run_workers(4, distant, {**DEEPSEEK, **FULL_RECOMPUTE, "parallel.layout": "dp2tp2"})
    assert [group for _, group in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    traces, reference = [trace for trace, _ in found], alone(DEEPSEEK)
    for pattern in ("ahead.depths.*", ROUTER, "*.attn.*", "embedding.token.weight"):
        assert error_of(traces, reference, pattern) < RELATIVE
    require_equal(traces, reference)
    for trace in traces:  # every router counts each token once: 8 samples of 16 tokens choose 3 experts
        loads = {name: load for name, load in trace.statistics[0].items() if name.endswith("router.load")}
        assert {name: float(load.sum()) for name, load in loads.items()} == dict.fromkeys(loads, 8 * 16 * 3)


# The clipping norm.

CLIPPED: Settings = {"optimizer.name": "sgd", "optimizer.lr": 1.0}
"""SGD's updates show by how much gradients are clipped."""
ATTENTION = ("norm1", "norm2", "attn.qkv", "attn.out")


def trained_alone(model: Settings, bound: float, *frozen: str) -> Settings:
    """A run that trains one kind of parameter, so that the norm is theirs."""
    names = ["embedding", "head", *(f"blocks.*.{part}" for part in frozen)]
    return {**model, **CLIPPED, "model.frozen": names, "trainer.max_grad_norm": bound}


@pytest.mark.parametrize(
    ("layout", "settings", "pattern"),
    [
        ("tp2", trained_alone(GPT_OSS, 1e-4, *ATTENTION, "moe"), "*.attn.sinks"),
        ("tp2ep2", trained_alone(EXPERTS, 1e-3, "attn", "norm1", "norm2", "moe.router"), "*.experts.*"),
    ],
    ids=["Megatron 8: sinks", "Megatron 5916: experts"],
)
@pytest.mark.wide("layouts")
def test_the_clipping_norm_has_what_lies_on_every_rank(layout: str, settings: Settings, pattern: str) -> None:
    traces, reference = ranks_of(layout, settings), alone(settings)
    sums = gradients(traces, reference, pattern)
    assert sums.keys() == reference.gradients[0].keys()
    whole = norm_of([*sums.values()])
    targets = whole / reference.norms[0]
    assert targets == pytest.approx(round(targets), rel=EXACT), "gradients are sums, the norm is that of their mean"
    assert norm_of([one.chunk(2)[0] for one in sums.values()]) < 0.95 * whole, "the other rank's must count"
    assert reference.norms[0] > 2 * settings["trainer.max_grad_norm"]
    require_equal(traces, reference)


# Parts of gradients, micro batches, documents.


def test_megatron_1699_the_rotary_key_that_heads_share_has_a_whole_gradient() -> None:
    """The last rows of `kv_down`. Without sequence parallelism, each rank has the gradient of its own heads."""
    traces, reference = ranks_of("tp2", DEEPSEEK, WHOLE_STREAM), alone(DEEPSEEK)
    assert error_of(traces, reference, "*.attn.kv_down.weight") < RELATIVE
    first, width = DEEPSEEK["model.kv_lora_rank"], DEEPSEEK["model.qk_rope_head_dim"]
    (found,) = gradients(traces, reference, "blocks.0.attn.kv_down.weight").values()
    (right,) = gradients([reference], reference, "blocks.0.attn.kv_down.weight").values()
    assert found.shape[0] == first + width
    assert bool(right[first:].any())
    torch.testing.assert_close(found[first:], right[first:], rtol=RELATIVE, atol=1e-15)


@pytest.mark.parametrize("balance", [pytest.param("sequence", marks=WIDE), "global_batch"])
@pytest.mark.wide("layouts")
def test_megatron_7213_the_balancing_loss_does_not_depend_on_micro_batches(balance: str) -> None:
    """Micro batches of 2, of 4 and of unequal sizes (`micro_batch` depends on them by definition, and says so)."""
    settings = {**EXPERTS, "model.aux_loss_coefficient": 0.5, "model.moe_balance": balance}
    settings |= {"model.z_loss_coefficient": 0.1}
    reference = alone(settings)
    require_equal([alone({**settings, "trainer.micro_batch_size": 4})], reference)
    require_equal(trained_once({**settings, "trainer.micro_batch_size": 4}, unevenly), reference)


def gradients_of_step(parts: Parts) -> dict[str, Tensor]:
    """The gradients that the sinks of one process hold after the first step's backward passes."""
    parts.stepper.forward_backward(parts.train_loader.take(8), 1)
    return {piece.name: piece.gradient.clone() for piece in parts.pieces}


def test_torchtitan_2252_the_gradient_of_a_tied_weight_is_that_of_both_its_uses() -> None:
    """By hand: the table and the projection apart, with equal values, have gradients whose sum is the tied one's."""
    tied = build(tiny_run(in_fp64(TIED)))
    apart = build(tiny_run(in_fp64({**TIED, "model.tie_embeddings": False})))
    values = tied.model.parameters()
    for name, parameter in apart.model.parameters().items():
        parameter.data.copy_(values["embedding.token.weight" if name == "head.project.weight" else name].data)
    one, two = gradients_of_step(tied), gradients_of_step(apart)
    table, projection = two.pop("embedding.token.weight"), two.pop("head.project.weight")
    assert bool(table.any())
    assert bool(projection.any())
    torch.testing.assert_close(one.pop("embedding.token.weight"), table + projection, rtol=EXACT, atol=1e-14)
    assert one.keys() == two.keys()


def in_parts(batch: dict[str, Tensor], lengths: list[int]) -> list[dict[str, Tensor]]:
    """The documents of a packed sample, each as a sample of its own."""
    found = []
    for number, part in enumerate(torch.arange(sum(lengths)).split(lengths)):
        own = {name: batch[name][:, part] for name in ("tokens", "labels", "positions")}
        length = torch.tensor([[lengths[number]] + [0] * (len(lengths) - 1)])
        found.append({**own, "sample_ids": batch["sample_ids"], "document_lengths": length})
    return found


END = 256


@pytest.mark.parametrize("inside", [None, END, 1], ids=["random", "an end token inside", "no end token at all"])
def test_torchtitan_2559_and_3130_documents_of_a_sample_compute_what_they_compute_alone(inside: int | None) -> None:
    """Each alone with positions from 0, whatever its tokens are."""
    parts = build(tiny_run(in_fp64({**PACKED, "trainer.micro_batch_size": 1})))
    (batch,) = parts.train_loader.take(1)
    lengths = batch["document_lengths"][0].tolist()
    assert len([length for length in lengths if length > 1]) > 1
    if inside is not None:
        ids = torch.randint(END, batch["tokens"].shape, generator=torch.Generator().manual_seed(1))
        ids[0, sum(lengths[: lengths.index(max(lengths))]) + 1] = inside
        batch = {**batch, "tokens": ids}

    def loss(sample: dict[str, Tensor]) -> float:
        (one,) = parts.train_loader.step_of([sample])
        return parts.model.loss(parts.stepper.entries(one, 1))[0].item()  # type: ignore[attr-defined]

    each = [loss(sample) for sample in in_parts(batch, lengths)]
    assert loss(batch) == pytest.approx(sum(each), rel=1e-13)
    first = {**batch, "document_lengths": torch.tensor([[sum(lengths)] + [0] * (len(lengths) - 1)])}
    assert loss(first) != pytest.approx(sum(each), rel=1e-4), "as one document it is another loss"


# What a run reports.


def tokens_of_step(settings: Settings) -> float:
    """Be one rank of a run: the number of tokens that a step reports."""
    parts = build(tiny_run(in_fp64(settings)))
    parts.stepper.forward_backward(parts.train_loader.take(8), 1)
    return parts.stepper.update(1e-3, 0.0).tokens.item()


def test_torchtitan_2983_tokens_that_a_run_has_seen_do_not_depend_on_the_layout() -> None:
    """A step of 8 samples of 16 tokens in 5 documents has 8 (16 - 5) targets: each document's last token has none."""
    expected = 8 * (16 - 5)
    assert tokens_of_step(PACKED) == expected
    assert run_workers(2, tokens_of_step, {**PACKED, "parallel.layout": "cp2"}) == [expected] * 2


CHAT: Settings = {
    "data.name": "packed",
    "data.path": str(Path(__file__).parent.parent / "plugins" / "data" / "packed" / "tests" / "chats.jsonl"),
    "data.validation_percent": 20,
    "data.max_documents": 5,
    "trainer.seq_length": 128,
    "trainer.eval_samples": 7,
    "model.num_layers": 2,
    "kernels.default": None,
}


def test_torchtitan_4167_the_validation_loss_is_the_mean_over_targets() -> None:
    """Micro batches of 1 and of 2 samples, in one process and on two ranks: all losses over the number of targets."""
    from mplug_validation import evaluate

    run = tiny_run(in_fp64({**CHAT, "trainer.micro_batch_size": 1}))
    parts = build(run)
    assert parts.validation_loader is not None
    found = evaluate(run, parts)
    parts.model.module.eval()
    entries = parts.stepper.entries  # type: ignore[attr-defined]
    pairs = [parts.model.loss(entries(batch, 0)) for batch in parts.validation_loader.take(7)]
    sums, counts = (torch.stack(list(values)).double().detach() for values in zip(*pairs, strict=True))
    assert found == pytest.approx((sums.sum() / counts.sum()).item(), rel=1e-14)
    assert found != pytest.approx((sums / counts).mean().item(), rel=1e-5), "the counts must differ enough to be seen"
    larger = tiny_run(in_fp64(CHAT))
    assert evaluate(larger, build(larger)) == pytest.approx(found, rel=1e-13)
    trained = [trace.val_loss for trace in train_ranks(2, {**CHAT, "parallel.layout": "dp2"})]
    assert trained == [pytest.approx(alone(CHAT).val_loss, rel=EXACT)] * 2
