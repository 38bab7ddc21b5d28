"""The decoder: embedding, parallel blocks, readout.

B batch, S sequence, D embed, H query heads, G KV heads, K head dim, F mlp, V vocabulary.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mplug_nn import Activation, DotProductAttention, Embedding, Linear, Loss, Norm

if TYPE_CHECKING:
    from nova_peregrine import Peregrine


class ParallelBlock(nn.Module):
    """x + leave([attention(q, k, v), swiglu(gate, up)]), with all of q, k, v, gate and up from enter(norm(x))."""

    def __init__(self, config: "Peregrine.Config") -> None:
        super().__init__()
        self.query_width, self.mlp_width = config.num_attention_heads * config.head_dim, config.ffn_hidden_size
        key_width, inner = config.num_kv_heads * config.head_dim, self.query_width + self.mlp_width
        self.norm = Norm(config.hidden_size, "layernorm", config.norm_eps)
        self.enter = Linear(config.hidden_size, self.query_width + 2 * key_width + 2 * self.mlp_width, bias=False)
        self.attn = DotProductAttention(
            config.num_attention_heads,
            config.num_kv_heads,
            config.head_dim,
            qk_norm=config.qk_norm,
            theta=config.rope_theta,
            eps=config.norm_eps,
        )
        self.mlp = Activation("swiglu")
        self.leave = Linear(inner, config.hidden_size, bias=False)

    def forward(self, x: Tensor, positions: Tensor, keys: Tensor, document_lengths: Tensor | None = None) -> Tensor:
        """x [B, S, D], positions [1 or B, S], keys [B], document_lengths [B, M] -> [B, S, D]."""
        h, x = self.norm(x)
        *qkv, gate_up = self.enter(h).split(self._widths(), dim=-1)  # [B, S, HK], twice [B, S, GK], [B, S, 2F]
        q, k, v = (part.unflatten(-1, (-1, self.attn.head_dim)) for part in qkv)
        mixed = self.attn.attend(q, k, v, positions, keys, document_lengths).flatten(-2)  # [B, S, HK]
        y: Tensor = self.leave(torch.cat((mixed, self.mlp.activate(gate_up)), dim=-1))
        return x + y

    def _widths(self) -> tuple[int, int, int, int]:
        """(HK, GK, GK, 2F) of this rank, as the weights are cut: query heads and MLP alike, KV heads perhaps less."""
        parts = (self.query_width + self.mlp_width) // self.leave.weight.shape[1]
        queries, gate_up = self.query_width // parts, 2 * self.mlp_width // parts
        keys = (self.enter.weight.shape[0] - queries - gate_up) // 2
        return queries, keys, keys, gate_up


class Readout(nn.Module):
    """The last norm, the projection to the vocabulary, the loss."""

    def __init__(self, config: "Peregrine.Config") -> None:
        super().__init__()
        self.norm = Norm(config.hidden_size, "layernorm", config.norm_eps)
        self.project = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss = Loss()

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, S, D], labels [B, S] -> (sum of the losses, number of targets)."""
        h, _ = self.norm(x)
        loss: tuple[Tensor, Tensor] = self.loss(h, self.project, labels)
        return loss

    def logits(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, V]."""
        h, _ = self.norm(x)
        logits: Tensor = self.project(h)
        return logits


class Decoder(nn.Module):
    """The units of a Peregrine; the host runs them in the plan's order."""

    def __init__(self, config: "Peregrine.Config") -> None:
        super().__init__()
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict({str(number): ParallelBlock(config) for number in range(config.num_layers)})
        self.readout = Readout(config)
        if config.tie_embeddings:
            self.readout.project.weight = self.embedding.weight
