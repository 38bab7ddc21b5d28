"""A mixture of experts in place of a block's feed-forward part (arXiv 1701.06538, 2101.03961, 2401.06066)."""

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from mplug.layout.inits import ZEROS, Entries, Inits
from mplug.layout.plan import Parameter
from mplug.layout.work import Branches, Step, WeightProduct
from mplug.model.slots.declaration import Slot
from mplug_nn.experts import Dropping, Experts, beyond_capacity
from mplug_nn.linear import Linear
from mplug_nn.mlp import MLP, Kind
from mplug_nn.router import OVER_SEQUENCES, Router, over_sequences

LATENT = "expert_latent"
"""The axis of latent vectors; no strategy divides it."""
Part = tuple[Tensor, ...]


def parts(*tokens: Tensor) -> tuple[Part, ...]:
    """The parts in which experts compute a micro batch: the default of the slot `MixtureOfExperts.parts`, one part.

    tokens: tensors [N, ...] of the same tokens -> parts of them, in order: tuples of tensors [n, ...], where the n add
    up to N. The rows of all parts depart first; then experts compute part after part. So the rows of one part travel
    while another part is computed. All ranks that exchange rows must have the same number of parts.

    The router sees the whole micro batch, so losses, statistics and capacity do not depend on parts. A weight's
    gradient is the sum of those of the parts.
    """
    return (tokens,)


PARTS = Slot("MixtureOfExperts.parts", "dispatch", parts)


class MixtureOfExperts(nn.Module):
    """A router, its experts, and an optional shared MLP that every token uses.

    `capacity_factor` None: no token is dropped. `shared_ffn_dim` 0: there is no shared MLP. With `shared_gate`, the
    shared MLP's output is multiplied by a sigmoid gate computed from the token. With `bias`, both projections of the
    experts have biases. With `latent_dim`, experts are that wide outside: `latent_down` projects a token before it
    travels to its experts, and `latent_up` projects their weighted sum. Router and shared MLP see the whole token.
    """

    SLOTS: ClassVar[tuple[Slot, ...]] = (OVER_SEQUENCES, PARTS)

    def __init__(
        self,
        router: Router,
        dim: int,
        ffn_dim: int,
        kind: Kind,
        *,
        capacity_factor: float | None = None,
        dropping: Dropping = "probability",
        shared_ffn_dim: int = 0,
        shared_gate: bool = False,
        bias: bool = False,
        latent_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.capacity_factor, self.dropping = capacity_factor, dropping
        self.over_sequences: Callable[..., Tensor] = over_sequences
        self.parts: Callable[..., tuple[Part, ...]] = parts
        self.router = router
        width, axis = (dim, "embed") if latent_dim is None else (latent_dim, LATENT)
        self.latent_down = None if latent_dim is None else Linear(dim, latent_dim, bias=False)
        self.experts = Experts(width, ffn_dim, router.gating.num_experts, kind, bias, axis)
        self.down_bias = nn.Parameter(torch.empty(router.gating.num_experts, width)) if bias else None
        self.latent_up = None if latent_dim is None else Linear(latent_dim, dim, bias=False)
        self.shared = MLP(dim, shared_ffn_dim, kind, bias=False) if shared_ffn_dim else None
        self.shared_gate = Linear(dim, 1, bias=False) if shared_ffn_dim and shared_gate else None

    def plan_entries(self, inits: Inits) -> Entries:
        """The meaning of what is neither the router's, the experts' nor the shared MLP's."""
        entries = {}
        if self.shared_gate is not None:
            entries["shared_gate.weight"] = Parameter(("gate", "embed"), inits.weight)
        if self.down_bias is not None:
            entries["down_bias"] = Parameter(("every_expert", self.experts.axis), ZEROS, decay=False)
        if self.latent_down is not None:
            entries["latent_down.weight"] = Parameter((LATENT, "embed"), inits.weight)
            entries["latent_up.weight"] = Parameter(("embed", LATENT), inits.residual)
        return entries

    def plan_work(self) -> Step:
        """Router, experts and shared experts take the same input; a token is multiplied by its chosen experts alone."""
        gating, experts = self.router.gating, self.experts
        up, down = (weight.numel() * gating.top_k // gating.num_experts for weight in (experts.up, experts.down))
        biases = () if self.down_bias is None else (WeightProduct("down_bias", self.down_bias.numel()),)
        shared = (name for name in ("shared", "shared_gate") if getattr(self, name) is not None)
        latent = (("latent_down",), ("latent_up",)) if self.latent_down is not None else ((), ())
        routed = (*latent[0], WeightProduct("experts.up", up), WeightProduct("experts.down", down), *latent[1])
        return Branches((("router", *biases), routed, *shared))

    @property
    def mixes(self) -> frozenset[str]:
        """`batch` if experts have a capacity, for which the tokens of a micro batch compete.

        Those of a sequence meet in a slot, so they do not count.
        """
        return frozenset() if self.capacity_factor is None else frozenset({"batch"})

    @property
    def varies(self) -> str:
        """What depends on the layout; empty if nothing does."""
        if self.capacity_factor is None:
            return ""
        return "experts have room for some tokens of a micro batch; trainer.micro_batch_size decides which are dropped"

    def forward(self, x: Tensor, positions: Tensor, keys: Tensor, document_lengths: Tensor | None) -> Tensor:
        """x [B, S, D], positions [1 or B, S], the samples' random keys [B], lengths [B, M] if packed -> [B, S, D].

        The lengths have no default: a capacity without them would be wrong where ranks divide samples by documents.
        """
        choices = self._within_capacity(self.router(x, positions, keys), document_lengths)
        chosen, gates = (of_tokens.flatten(0, 1) for of_tokens in choices)
        rows = x if self.latent_down is None else self.latent_down(x)
        divided = self.parts(rows.flatten(0, 1), chosen, gates)
        begun = [self.experts.begin(*part) for part in divided]
        shared = None if self.shared is None else self._shared(x)  # while rows travel
        worked = [self.experts.work(*part, number, len(begun)) for number, part in enumerate(begun)]
        summed = [self.experts.finish(part[2], *own) for part, own in zip(divided, worked, strict=True)]
        y = summed[0] if len(summed) == 1 else torch.cat(summed)
        y = (y if self.down_bias is None else y + self._biases(chosen, gates).to(y.dtype)).view_as(rows)
        y = y if self.latent_up is None else self.latent_up(y)
        return y if shared is None else y + shared

    def _within_capacity(self, choices: tuple[Tensor, Tensor], lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """chosen and gates [B, S, k] -> the same; a choice beyond the capacity becomes E, and its gate 0.

        Of choices with equal gates, the first ones of a sample stay, so their order counts.
        """
        chosen, gates = choices
        if self.capacity_factor is None:
            return chosen, gates
        experts = self.router.gating.num_experts
        beyond = partial(beyond_capacity, num_experts=experts, factor=self.capacity_factor, dropping=self.dropping)
        dropped = self.over_sequences(beyond, chosen, gates.detach(), lengths=lengths)
        return chosen.masked_fill(dropped, experts), gates.masked_fill(dropped, 0.0)

    def _biases(self, chosen: Tensor, gates: Tensor) -> Tensor:
        """The biases of the chosen experts' down projections, weighted: chosen and gates [N, k] -> [N, D].

        All ranks hold all of these biases. A dropped choice has the gate 0.
        """
        assert self.down_bias is not None
        experts = len(self.down_bias)
        of_all = gates.new_zeros(len(gates), experts + 1).scatter_add(1, chosen, gates)[:, :experts]
        return of_all @ self.down_bias.to(gates.dtype)

    def _shared(self, x: Tensor) -> Tensor:
        assert self.shared is not None
        y: Tensor = self.shared(x)
        return y if self.shared_gate is None else y * torch.sigmoid(self.shared_gate(x))
