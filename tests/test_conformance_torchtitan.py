"""Issues of torchtitan about tied weights, packed samples, context parallelism and what goes with them, as our cases.

A test's docstring names the issue (or the pull request, where there is no issue), its state in September 2026, and the
failure. docs/conformance.md has the table.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from conformance import (
    DEEPSEEK,
    GPT_OSS,
    Settings,
    alone,
    error_of,
    gradients,
    ranks_of,
    require_equal,
)
from tiny_models import DECODER, EXPERTS
from torch import Tensor

from mplug.training.assembly import Parts, build
from mplug_testing import run_workers
from mplug_testing.harness import EXACT, in_fp64, tiny_run, train_ranks

WIDE = pytest.mark.wide("layouts")
RELATIVE = 1e-9
CHATS = Path(__file__).parent.parent / "plugins" / "data" / "packed" / "tests" / "chats.jsonl"

TIED: Settings = {**DECODER, "model.name": "llama", "model.tie_embeddings": True}
PACKED: Settings = {**DECODER, "model.name": "qwen", "data.documents": 5}
"""Qwen 3's decoder with five documents of random lengths in every sample of 16 tokens."""
AHEAD_AND_INTERLEAVED: Settings = {
    "model.num_layers": 4,
    "model.num_mtp_layers": 1,
    "parallel.pp.schedule": "interleaved",
}


# Tied weights.


@pytest.mark.parametrize(
    "layout", ["fsdp2", *(pytest.param(word, marks=WIDE) for word in ("tp2", "zero2", "fsdp2tp2"))]
)
def test_issue_2252_tied_weights_stay_one_parameter_after_the_meta_device(layout: str) -> None:
    """Issues 2252 and 1524 (open), 2495 (closed): weights that were tied on the meta device become two.

    The table and the projection get memory of their own, or are sharded in two groups, and train apart. Here the model
    has one parameter under every layout, and its gradient and its updates are those of one process.
    """
    reference = alone(TIED)
    assert "embedding.token.weight" in reference.shapes
    assert "head.project.weight" not in reference.shapes
    require_equal(ranks_of(layout, TIED), reference)


def gradients_of_step(parts: Parts) -> dict[str, Tensor]:
    """The gradients that the sinks of one process hold after the first step's backward passes."""
    parts.stepper.forward_backward(parts.train_loader.take(8), 1)
    return {piece.name: piece.gradient.clone() for piece in parts.pieces}


def test_issue_2252_the_gradient_of_a_tied_weight_is_that_of_both_its_uses() -> None:
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


@pytest.mark.parametrize("options", [{}, pytest.param(AHEAD_AND_INTERLEAVED, marks=WIDE)], ids=["1f1b", "interleaved"])
def test_issue_1524_tied_weights_are_trained_in_a_pipeline(options: Settings) -> None:
    """Issue 1524 (open), pull requests 1409 and 2580: tied weights are refused in a pipeline.

    The first stage has the table and the last the projection. Here both stages have the sum of both gradients, and each
    step's weights are those of one process. With multi-token prediction a third unit has both.
    """
    settings = {**TIED, **{name: value for name, value in options.items() if name.startswith("model.")}}
    require_equal(ranks_of("pp2", settings, options), alone(settings))


# Pipelines.


def test_issue_2972_a_pipeline_scales_gradients_as_one_process_does() -> None:
    """Issue 2972 (open), pull request 4194; issue 1733 (closed): gradients of a pipeline have another scale.

    The loss that enters backward is a sum, and the division by the number of targets comes later, for the reported loss
    only; or gradients are divided in every step of an accumulation. Here a pipeline with four micro batches of unequal
    numbers of targets has the gradients, norms and clipped updates of one process.
    """
    traces, reference = ranks_of("pp2", TIED), alone(TIED)
    assert tiny_run({**TIED, "parallel.layout": "pp2"}).micro_batch_counts()[0] == 4
    assert error_of(traces, reference, "*") < RELATIVE
    for trace in traces:
        assert trace.norms == pytest.approx(reference.norms, rel=EXACT)


def test_issue_1612_every_stage_knows_the_documents() -> None:
    """Issue 1612 (open): a pipeline cannot pass the mask of documents to its stages.

    Here each stage has the document lengths of its micro batch, and the run is that of one process.
    """
    require_equal(ranks_of("pp2", PACKED), alone(PACKED))


def test_tokens_ahead_are_predicted_in_a_pipeline_and_with_divided_sequences() -> None:
    """Pull request 3392 (multi-token prediction): it is refused with pipelines and with context parallelism.

    Here the run with two depths, packed samples and experts is that of one process under both.
    """
    require_equal(ranks_of("pp2", DEEPSEEK), alone(DEEPSEEK))
    require_equal(ranks_of("dp2cp2", DEEPSEEK), alone(DEEPSEEK))


@WIDE
def test_issue_771_fsdp_with_a_pipeline_and_divided_sequences_is_exact() -> None:
    """Issue 771 (closed): FSDP with a pipeline and context parallelism changes losses and convergence."""
    require_equal(ranks_of("cp2fsdp2pp2", PACKED), alone(PACKED))


# Packed samples.


def in_parts(batch: dict[str, Tensor], lengths: list[int]) -> list[dict[str, Tensor]]:
    """The documents of a packed sample, each as a sample of its own."""
    found = []
    for number, part in enumerate(torch.arange(sum(lengths)).split(lengths)):
        own = {name: batch[name][:, part] for name in ("tokens", "labels", "positions")}
        length = torch.tensor([[lengths[number]] + [0] * (len(lengths) - 1)])
        found.append({**own, "sample_ids": batch["sample_ids"], "document_lengths": length})
    return found


END = 256


@pytest.mark.parametrize("tokens", ["random", "one document has the end token inside", "no end token at all"])
def test_issue_2559_documents_of_a_sample_compute_what_they_compute_alone(tokens: str) -> None:
    """Issue 2559 (closed): rotary positions of a packed document continue those of the document before it.

    Issue 3130 (closed): the end token says where documents end, and SFT's inputs lack it, so a document sees the ones
    before it; and one that has the token inside is cut. Here the sum of the losses of a packed sample is the sum of the
    losses of its documents, each alone with positions from 0, whatever its tokens are.
    """
    parts = build(tiny_run(in_fp64({**PACKED, "trainer.micro_batch_size": 1})))
    (batch,) = parts.train_loader.take(1)
    lengths = batch["document_lengths"][0].tolist()
    assert len([length for length in lengths if length > 1]) > 1
    if tokens != "random":
        ids = torch.randint(END, batch["tokens"].shape, generator=torch.Generator().manual_seed(1))
        inside = lengths.index(max(lengths))
        ids[0, sum(lengths[:inside]) + 1] = END if tokens.startswith("one") else 1
        batch = {**batch, "tokens": ids}

    def loss(sample: dict[str, Tensor]) -> float:
        (one,) = parts.train_loader.step_of([sample])
        return parts.model.loss(parts.stepper.entries(one, 1))[0].item()  # type: ignore[attr-defined]

    each = [loss(sample) for sample in in_parts(batch, lengths)]
    assert loss(batch) == pytest.approx(sum(each), rel=1e-13)
    first = {**batch, "document_lengths": torch.tensor([[sum(lengths)] + [0] * (len(lengths) - 1)])}
    assert loss(first) != pytest.approx(sum(each), rel=1e-4), "as one document it is another loss"


METHODS: list[Any] = ["ring", *(pytest.param(method, marks=WIDE) for method in ("all_gather", "ulysses"))]


@pytest.mark.parametrize("method", METHODS)
def test_issue_2536_documents_of_any_lengths_are_divided(method: str) -> None:
    """Issue 2536 (open): packed documents with context parallelism are refused, or must divide by 2 cp.

    Here documents of 1 to 12 tokens are divided over 4 ranks, and the run is that of one process.
    """
    parts = build(tiny_run(in_fp64(PACKED)))
    lengths = torch.cat([batch["document_lengths"] for batch in parts.train_loader.take(8)])
    assert bool((lengths % 8 != 0).any(dim=1).all()), "in every sample a document does not divide by 2 cp"
    require_equal(ranks_of("cp4", PACKED, {"parallel.cp.method": method}), alone(PACKED))


# Context parallelism.


def test_issue_2446_tensor_and_context_parallelism_together_report_the_loss_of_one_process() -> None:
    """Issue 2446 (open): Qwen 3 fails with both. Issues 3280 and 3329 (closed): the reported loss is half of it.

    The loss is not summed over the ranks of context parallelism if tensor parallelism is on. Here all ranks report the
    loss of one process, and gradients are the same.
    """
    traces, reference = ranks_of("cp2tp2", PACKED), alone(PACKED)
    assert [trace.losses for trace in traces] == [pytest.approx(reference.losses, rel=EXACT)] * 4
    require_equal(traces, reference)


def tokens_of_step(settings: Settings) -> float:
    """Be one rank of a run: the number of tokens that a step reports."""
    parts = build(tiny_run(in_fp64(settings)))
    parts.stepper.forward_backward(parts.train_loader.take(8), 1)
    return parts.stepper.update(1e-3, 0.0).tokens.item()


def test_issue_2983_tokens_that_a_run_has_seen_do_not_depend_on_the_layout() -> None:
    """Issue 2983 (open): the number of tokens seen is multiplied by the degree of context parallelism.

    Here a step of 8 samples of 16 tokens in 5 documents has 8 (16 - 5) targets: each document's last token has none.
    """
    expected = 8 * (16 - 5)
    assert tokens_of_step(PACKED) == expected
    assert run_workers(2, tokens_of_step, {**PACKED, "parallel.layout": "cp2"}) == [expected] * 2


# Losses and biases.

CHAT: Settings = {
    "data.name": "packed",
    "data.path": str(CHATS),
    "data.validation_percent": 20,
    "data.max_documents": 5,
    "trainer.seq_length": 128,
    "trainer.eval_samples": 7,
    "model.num_layers": 2,
    "kernels.default": None,
}


def test_pull_request_4167_the_validation_loss_is_the_mean_over_targets() -> None:
    """Pull request 4167 (merged): validation averages the means of its batches.

    Batches with few targets then weigh too much: of sums and counts (2, 1) and (90, 9) the mean is 9.2, not 6.0. Here
    micro batches of 1 and of 2 samples, in one process and on two ranks, give the sum of all losses divided by the
    number of all targets.
    """
    from mplug.training.evaluation import evaluate

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


@pytest.mark.parametrize("layout", ["tp2etp2", *(pytest.param(word, marks=WIDE) for word in ("tp2", "etp2", "tp2ep2"))])
def test_pull_request_4245_a_bias_is_added_once_whatever_the_ranks_divide(layout: str) -> None:
    """Pull requests 4245 (merged) and 4332 (closed): biases after a sum over ranks, in gpt-oss's experts and linears.

    Every rank adds the whole bias before the sum, so it counts once a rank; or a share of it, and then its gradient is
    divided by the degree. Here all biases have the gradients and the updates of one process. They begin as zeros, so
    the second step has the first loss that depends on them.
    """
    traces, reference = ranks_of(layout, GPT_OSS), alone(GPT_OSS)
    for pattern in ("*.attn.out.bias", "*.moe.down_bias", "*.moe.experts.up_bias"):
        assert error_of(traces, reference, pattern) < RELATIVE
    require_equal(traces, reference)


def test_issue_2387_the_router_and_the_experts_have_whole_gradients_where_tokens_are_divided() -> None:
    """Issue 2387 (pull request 2416, merged): the router's gradient lacks a sum over tensor-parallel ranks.

    Issue 160285 of PyTorch (open): with expert parallelism the experts' gradients are doubled. Pull request 4154
    (merged): the bias that balances the load is computed from one rank's counts. Here gradients, counts and choices of
    two steps under tp2ep2 are those of one process. The bias moves far enough to change the second step's choices.
    """
    settings = {**EXPERTS, "model.aux_loss_coefficient": 0.1, "model.expert_bias_rate": 0.5}
    traces, reference = ranks_of("tp2ep2", settings), alone(settings)
    for pattern in ("*.moe.router.weight", "*.moe.experts.*"):
        assert error_of(traces, reference, pattern) < RELATIVE
    require_equal(traces, reference)
    unbiased = alone({**settings, "model.expert_bias_rate": 0.0})
    assert unbiased.losses[1] != pytest.approx(reference.losses[1], rel=1e-6)
    assert gradients(traces, reference, "*.moe.router.weight").keys() == {
        f"blocks.{number}.moe.router.weight" for number in range(2)
    }
