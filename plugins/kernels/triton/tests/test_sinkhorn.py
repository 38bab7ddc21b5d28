"""Sinkhorn's shares by one kernel: the function of plain torch in fp64, over tiles that are full and partial.

The suite has small cases (`mplug_testing.kernel_cases.experts`).
"""

from typing import Any

import mplug_triton
import pytest
import torch
from mplug_triton import LARGEST_SEQUENCE, Triton, sinkhorn
from offers import run
from torch import Tensor
from triton_kernels import CANNOT_RUN, DEVICE, INTERPRETED, repair_the_interpreter, runs

from mplug import Site
from mplug_nn import Gating, Router
from mplug_nn.router import balanced_scores as plain

if INTERPRETED and not CANNOT_RUN:
    repair_the_interpreter()


def drawn(*shape: int, preferred: float = 0.0) -> Tensor:
    """Logits; all tokens prefer the first expert."""
    logits = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    logits[..., 0] += preferred
    return logits.to(DEVICE)


def assert_exact(logits: Tensor) -> None:
    """As near to fp64 as plain torch is, but for the order of sums."""
    exact, single = plain(logits.double(), "sinkhorn"), plain(logits, "sinkhorn")
    found = sinkhorn.balanced_scores(logits, "sinkhorn")
    assert found.dtype == torch.float32
    error = float((single.double() - exact).abs().max())
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=max(1e-6, 2 * error))


@runs
@pytest.mark.parametrize("preferred", [0.0, 90.0], ids=["some spread", "shares that fp32 rounds to 0"])
def test_tiles_of_a_sequence_give_its_shares(preferred: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinkhorn, "TILE", 64)
    assert_exact(drawn(2, 37, 6, preferred=preferred))
    assert_exact(drawn(1, 32, 8, preferred=preferred).transpose(1, 2).contiguous().transpose(1, 2))


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "experts"), [(4096, 8), (8192, 8), (4001, 7), (1024, 64), (512, 128)])
def test_long_sequences_have_the_shares_of_plain_torch(length: int, experts: int) -> None:
    for preferred in (0.0, 100.0):
        logits = drawn(3, length, experts, preferred=preferred)
        assert_exact(logits)
        first, again = (sinkhorn.balanced_scores(x, "sinkhorn") for x in (logits, logits[:1]))
        assert torch.equal(first[:1], again), "a sequence is computed by itself, with the same bits"


def answer(score: str, experts: int, during: Any) -> bool | str:
    """What the offer says of a router."""
    (offer,) = (one for one in Triton(Triton.Config()).offer(during) if "Router.balanced_scores" in one.suppliers)
    with torch.device("meta"):
        router = Router(8, Gating(experts, 2, score))
    return offer.answer(Site("blocks.*.router", "Router.balanced_scores", router, "", frozenset()), during)


@pytest.mark.parametrize("score", ["sinkhorn", "sinkhorn_sigmoid"])
def test_it_serves_routers_that_balance_their_choice(score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mplug_triton, "find_spec", lambda name: name)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert answer(score, 8, run()) is True
    assert answer("softmax", 8, run(balance="kernels/triton")) is False


def test_sequences_that_a_cache_does_not_hold_are_left_to_plain_torch() -> None:
    largest = LARGEST_SEQUENCE // 4096
    assert answer("sinkhorn", 2 * largest, run()) is False
    reason = str(answer("sinkhorn", 2 * largest, run(balance="kernels/triton")))
    assert "up to 65536 logits of a sequence, and trainer.seq_length times experts is 131072" in reason
