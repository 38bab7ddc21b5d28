"""The model and the kernel keep their contracts, and both compute what the paper says."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mplug_nn import AttentionInputs, AttentionSpec
from mplug_testing import KernelSuite, ModelSuite

TINY: dict[str, Any] = {
    "model.num_layers": 3,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.vocab_size": 259,
    "model.init_std": 0.06,
}
NO_INPUTS = AttentionInputs()


class TestLinearTransformer(ModelSuite):
    plugin = "linear"
    settings = {**TINY, "kernels.default": None}
    layouts = ("", "dp2", "pp2", "fsdp2")
    positions = "absolute"

    def reference(self, weights: Any, batch: Any, config: Any) -> Tensor:
        """Pre-norm blocks (GPT-2, section 2.3) with the paper's recurrence."""
        heads, x = config.num_attention_heads, weights["embedding.token.weight"][batch["tokens"]]
        x = x + weights["embedding.position.weight"][batch["positions"]]
        for n in range(config.num_layers):
            w = {name.removeprefix(f"blocks.{n}."): one for name, one in weights.items() if f"blocks.{n}." in name}
            qkv = (layer_norm(x, w["norm1.weight"]) @ w["attn.qkv.weight"].T).unflatten(-1, (3, heads, -1))
            x = x + recurrent(*qkv.unbind(2)).flatten(2) @ w["attn.out.weight"].T
            h = layer_norm(x, w["norm2.weight"]) @ w["mlp.up.weight"].T
            x = x + (h * (1 + torch.erf(h / 2**0.5)) / 2) @ w["mlp.down.weight"].T
        return layer_norm(x, weights["head.norm.weight"]) @ weights["head.project.weight"].T

    def core_flops(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Any:
        from nova_linear.decoder import core_flops

        return core_flops(q.shape[2], spec.key_width, spec.value_width)


class TestChunked(KernelSuite):
    plugin = "chunked"
    settings: ClassVar = {"kernels.chunked.chunk": 8, "model.name": "linear", **TINY}
    computes = "linear attention"

    def reference(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        """Every pair's weight by the definition, written apart from the package."""
        length, shared = q.shape[1], q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(shared, dim=2) for x in (k, v))
        q, k = (x.clamp(min=0) + x.clamp(max=0).exp() for x in (q, k))
        past = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()[:, :, None]  # [S, S, 1]
        weights = (q[:, :, None] * k[:, None]).sum(-1).where(past, 0.0)[..., None]  # [B, S, S, H, 1]
        return (weights * v[:, None]).sum(2) / weights.sum(2)


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def drawn(length: int, heads: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, length, heads, width, dtype=torch.float64, generator=generator)


def recurrent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Algorithm 1 of the paper: a matrix and a vector per head, which a token at a time is added to."""
    phi = [torch.nn.functional.elu(x) + 1 for x in (q, k)]
    b, s, h, width = q.shape
    state, total = q.new_zeros(b, h, width, v.shape[3]), q.new_zeros(b, h, width)
    outputs = []
    for i in range(s):
        state = state + phi[1][:, i, :, :, None] * v[:, i, :, None, :]
        total = total + phi[1][:, i]
        outputs.append(torch.einsum("bhk,bhkv->bhv", phi[0][:, i], state) / (phi[0][:, i] * total).sum(-1)[..., None])
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("chunk", [1, 5, 37, 64])
def test_chunks_of_any_size_and_the_definition_give_what_a_token_at_a_time_gives(chunk: int) -> None:
    from nova_linear.chunks import attention
    from nova_linear.weights import linear_attention

    q, k, v = drawn(37, 3, 8, 0), drawn(37, 3, 8, 1), drawn(37, 3, 6, 2)
    expected, spec = recurrent(q, k, v), AttentionSpec(0.3, 8, 6)
    for found in (attention(q, k, v, spec, NO_INPUTS, chunk=chunk), linear_attention(q, k, v, spec, NO_INPUTS)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def multiplied(length: int, chunk: int, width: int) -> int:
    """FLOPs of the kernel's matrix products, forward, of two samples with three heads."""
    from nova_linear.chunks import attention

    q, k, v = (drawn(length, 3, width, seed) for seed in range(3))
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v, AttentionSpec(1.0, width, width), NO_INPUTS, chunk=chunk)
    return counter.get_total_flops()


def test_the_kernels_work_grows_with_the_length_and_the_plan_states_what_no_chunk_can_save() -> None:
    from nova_linear.decoder import core_flops

    assert multiplied(64, 8, 16) == 4 * multiplied(16, 8, 16)
    stated = core_flops(3, 16, 16)
    assert stated.per_squared_length == 0
    states = 3 * multiplied(64, 1, 16) / (2 * 64)  # a token, forward and backward
    normaliser_and_own_pair = 3 * 2 * 3 * (16 + 16 + 16 + 17)  # the column of ones twice; q k and its product with v
    assert states == stated.per_token + normaliser_and_own_pair
