"""Questions to the offers of a kernel: what it says of a site in a run, which both are described, not built."""

from types import SimpleNamespace
from typing import Any

from mplug import Offer, Site
from mplug_nn import AttentionSpec
from mplug_testing import precision_named


def attention(
    *needs: str, dropout: float = 0.0, head_dim: int = 64, value_width: int | None = None, slot: str = "Attention.core"
) -> Site:
    """A site of attention with needs."""
    spec = AttentionSpec(0.1, head_dim, value_width or head_dim, dropout=dropout)
    module = SimpleNamespace(dropout=dropout, head_dim=head_dim, spec=spec)
    return Site("blocks.*.attn", slot, module, "blocks.0.attn", frozenset(needs))


def run(
    device: str = "cuda", precision: str = "bf16", deterministic: bool = False, seq_length: int = 4096, **others: Any
) -> Any:
    """A run as an offer sees it; `others` are the kernels that it names by kind."""
    trainer = SimpleNamespace(precision=precision, deterministic=deterministic, seq_length=seq_length)
    config = SimpleNamespace(trainer=trainer, kernels=SimpleNamespace(kinds=others, rivals=()))
    return SimpleNamespace(device=device, config=config, precision=precision_named(precision))


def note(offers: list[Offer], at: Site, during: Any) -> str:
    """What the one offer that supports a site says of itself."""
    (offer,) = (offer for offer in offers if offer.answer(at, during) is True)
    return offer.note(at, during)


def refusal(offers: list[Offer], at: Site, during: Any) -> str:
    """What the offers say if none supports a site: one reason."""
    (reason,) = {offer.answer(at, during) for offer in offers} - {False}
    assert isinstance(reason, str)
    return reason
