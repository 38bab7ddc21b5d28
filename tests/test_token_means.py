"""A router's losses are means over tokens: over all positions of the global batch, however few have a target."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from layout_words import layouts, under
from tiny_models import MIXTRAL
from torch import Tensor, nn
from torch.nn import functional as F

from mplug import MicroBatch, RankBatch, Run, UsageError
from mplug.tensors.host_buffers import register_host_buffer
from mplug.training.assembly import build
from mplug.training.batch_parts import count_targets
from mplug.training.stepper import DefaultStepper
from mplug_steps import TokenScale
from mplug_testing.harness import Trace, difference, tiny_run, train_ranks, train_steps

Settings = dict[str, Any]
BALANCE, Z = 0.7, 0.3
E, K, S, BATCH = 4, 2, 20, 8  # targets / tokens is no binary fraction
MODEL: Settings = {
    **MIXTRAL,
    "model.num_layers": 1,
    "model.init_std": 0.2,
    "model.moe_balance": "sequence",
    "model.aux_loss_coefficient": BALANCE,
    "model.z_loss_coefficient": Z,
    "trainer.precision": "fp64",
    "trainer.seq_length": S,
}
WITHOUT: Settings = {**MODEL, "model.aux_loss_coefficient": 0.0, "model.z_loss_coefficient": 0.0}
ROUTER, LOSSES = "blocks.0.moe.router.weight", "blocks.0.moe.router.losses"


def answers(batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """Conversations, of which few tokens have a target: two of 20, and none in every fourth sample."""
    for batch in batches:
        labels = torch.full_like(batch["labels"], -100)
        taught = (batch["sample_ids"] % 4 != 0).nonzero().flatten()
        labels[taught, -2:] = batch["labels"][taught, -2:]
        yield {**batch, "labels": labels}


def sink_of(settings: Settings) -> tuple[Tensor, Tensor, Tensor, int]:
    """(the sink of the router's weight after the first step's micro batches, the weight, its inputs, the targets)."""
    run = tiny_run(settings)
    parts, seen = build(run), []
    router = parts.model.module.get_submodule("blocks.0.moe.router")
    router.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].detach().clone()))
    run.step = 1
    feed = parts.train_loader
    parts.stepper.forward_backward(feed.step_of(list(answers(feed.loader.take(BATCH)))), 1)
    sink = parts.model.sinks[ROUTER]
    return sink.buffer.clone(), sink.parameter.detach().clone(), torch.cat(seen), int(parts.stepper.sums[1])


def plain(weight: Tensor, x: Tensor) -> Tensor:
    """Switch's equations 4 to 6 for each sequence, and ST-MoE's equation 5: inputs [B, S, D] -> the loss []."""
    logits = x @ weight.t()  # [B, S, E]
    probabilities = logits.softmax(dim=-1)
    chosen = F.one_hot(logits.topk(K, dim=-1).indices, E).sum(dim=2).to(logits.dtype)  # [B, S, E]
    shares = chosen.sum(dim=1) / (S * K)  # f [B, E]
    balance = E * (shares * probabilities.mean(dim=1)).sum(dim=-1).mean()
    z = logits.logsumexp(dim=-1).square().mean()
    return BALANCE * balance + Z * z


@pytest.mark.parametrize("size", [1, 2, 8], ids=lambda size: f"micro batches of {size}")
def test_a_router_has_the_gradient_of_the_mean_over_all_tokens(size: int) -> None:
    own: Settings = {"trainer.micro_batch_size": size}
    with_losses, weight, x, targets = sink_of({**MODEL, **own})
    found = (with_losses - sink_of({**WITHOUT, **own})[0]) / targets
    assert (targets, x.shape[:2].numel()) == (12, BATCH * S)
    weight.requires_grad_()
    plain(weight, x).backward()
    torch.testing.assert_close(found, weight.grad, rtol=1e-10, atol=1e-13)


@cache
def alone(size: int) -> Trace:
    return train_steps({**MODEL, "trainer.micro_batch_size": size}, portions=answers)


def test_the_run_and_the_reported_losses_do_not_depend_on_the_size_of_micro_batches() -> None:
    assert difference([alone(1)], alone(4)) == ""
    balance, z = alone(4).statistics[0][LOSSES].tolist()
    assert 1.0 <= balance < 2.0, "per token: 1 if all experts are chosen equally often"
    assert z == pytest.approx(alone(1).statistics[0][LOSSES][1].item(), rel=1e-12)


BLOCKS: Settings = {"model.num_layers": 2}


@cache
def two_blocks() -> Trace:
    return train_steps({**MODEL, **BLOCKS}, portions=answers)


WIDE = ["dp2", "zero2", "fsdp2", "tp2", "cp2", "tp2ep2", "dp2cp2", "pp2ep2", "cp2pp2", "zero2tp2"]


@pytest.mark.parametrize("layout", layouts(["pp2", "ep2"], WIDE, "experts"))
@pytest.mark.wide("layouts", quick=["pp2"])
def test_a_layout_gives_the_run_of_one_process(layout: str) -> None:
    ranks, settings = under({**MODEL, **BLOCKS}, layout)
    assert difference(train_ranks(ranks, settings, answers), two_blocks()) == ""


def test_a_stepper_that_does_not_read_in_advance_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DefaultStepper, "read", lambda _, batches: batches)
    with pytest.raises(RuntimeError, match=r"from default.read\(micro_batches\)"):
        train_steps(MODEL)
    train_steps(WITHOUT)  # which needs no factor, and reads on request


@pytest.mark.parametrize("counts", [True, False])
def test_micro_batches_without_labels_are_refused_by_every_rank(counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "counts_samples", counts)
    run = tiny_run(MODEL)
    stepper = build(run).stepper
    assert isinstance(stepper, DefaultStepper)
    with pytest.raises(UsageError, match="no entry 'labels' whose targets could be counted"):
        stepper.read([RankBatch({"tokens": torch.zeros(1, S, dtype=torch.int64)}, 0, True, 0, None)])


class Mean(nn.Module):
    """A block of another package with a loss that is a mean over tokens, and no loss of any other kind."""

    def __init__(self) -> None:
        super().__init__()
        register_host_buffer(self, "scale", "token scale")


def test_the_factor_has_the_loss_scale_for_a_module_without_a_buffer_of_it() -> None:
    run, part, loss_scale = tiny_run({"trainer.precision": "fp32"}), Mean(), torch.tensor(64.0)
    run.device = "cpu"
    scale = TokenScale(run, part, loss_scale)
    labels = torch.tensor([[1, 2, -100, -100, -100, -100, -100, -100]])
    batch = RankBatch({"labels": labels}, 0, True, *count_targets({"labels": labels}))
    assert scale.read([batch]) is not None
    assert float(part.get_buffer("scale")) == 64 * 2 / 8
    loss_scale.fill_(32)
    scale.begin_step()
    scale.read([batch])
    assert float(part.get_buffer("scale")) == 32 * 2 / 8
