"""Attention by parts, and of packed samples, by the kernels that return the log-sum-exp.

B batch, S queries, T keys, H query heads, G KV heads, K head dim, M documents, N stretches. For stretches, a kernel
receives the tokens of all samples concatenated, [B S, H, K], and the start of each stretch.
"""

import torch
from torch import Tensor

from mplug_nn.parts import AttentionParts, Lengths, Part

aten = torch.ops.aten


def begins(lengths: Tensor) -> Tensor:
    """The start of each stretch in the concatenated samples, and the end of the last: [B, N] -> int32 [B N + 1]."""
    return torch.nn.functional.pad(lengths.flatten().cumsum(dim=0), (1, 0)).to(torch.int32)


def packed_by_flash(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, dropout: float, causal: bool
) -> Tensor:
    """Attention inside documents: q [B, S, H, K], k and v [B, S, G, K], lengths [B, M] -> [B, S, H, K]."""
    rows, where, length = [x.flatten(0, 1) for x in (q, k, v)], begins(lengths), q.shape[1]
    operator = aten._flash_attention_forward
    mixed: Tensor = operator(*rows, where, where, length, length, dropout, causal, False, scale=scale)[0]
    return mixed.unflatten(0, q.shape[:2])


class FlashParts(AttentionParts):
    """Parts by torch's own flash attention (FlashAttention-2)."""

    name = "torch_flash"

    def attend(self, part: Part) -> tuple[Tensor, Tensor]:
        """(output [B, S, H, K], log-sum-exp [B, H, S])."""
        q, k, v, scale, causal, lengths, _ = part
        rows, where = _rows((q, k, v), lengths)
        size = (q.shape[1], k.shape[1])
        output, sums, *_ = aten._flash_attention_forward(*rows, *where, *size, 0.0, causal, False, scale=scale)
        if lengths is None:
            return output, sums
        sums = sums.masked_fill(sums == float("inf"), float("-inf"))  # the kernel's value for a query without keys
        return output.unflatten(0, q.shape[:2]), sums.unflatten(1, q.shape[:2]).transpose(0, 1)

    def differentiate(
        self, part: Part, grad: Tensor, output: Tensor, log_sum_exp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq [B, S, H, K], dk and dv [B, T, G, K])."""
        q, k, v, scale, causal, lengths, _ = part
        (grad, output, *rows), where = _rows((grad.contiguous(), output, q, k, v), lengths)
        sums = log_sum_exp if lengths is None else log_sum_exp.transpose(0, 1).flatten(1)  # [H, B S]
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout's generator; unused
        size, unused = (q.shape[1], k.shape[1]), torch.empty(0, device=q.device)
        of_rows = aten._flash_attention_backward(
            grad, *rows, output, sums.contiguous(), *where, *size, 0.0, causal, state, unused, scale=scale
        )
        dq, dk, dv = of_rows if lengths is None else (x.unflatten(0, (len(q), -1)) for x in of_rows)
        return dq, dk, dv


FLASH_PARTS = FlashParts()


class CudnnParts(AttentionParts):
    """Parts by cuDNN, without stretches; a single key, which cuDNN rejects, goes to torch's flash attention."""

    name = "cudnn"

    def attend(self, part: Part) -> tuple[Tensor, Tensor]:
        """(output [B, S, H, K], log-sum-exp [B, H, S])."""
        if part.k.shape[1] == 1:
            return FLASH_PARTS.attend(part)
        heads = [x.transpose(1, 2) for x in (part.q, part.k, part.v)]
        output, sums, *_ = aten._scaled_dot_product_cudnn_attention(
            *heads, None, True, 0.0, part.causal, False, scale=part.scale
        )
        return output.transpose(1, 2), sums.flatten(2)

    def differentiate(
        self, part: Part, grad: Tensor, output: Tensor, log_sum_exp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq [B, S, H, K], dk and dv [B, T, G, K])."""
        q, k, v = part.q, part.k, part.v
        if k.shape[1] == 1:
            return FLASH_PARTS.differentiate(part, grad, output, log_sum_exp)
        heads = [x.transpose(1, 2) for x in (grad, q, k, v, output)]
        state = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout's generator; unused
        sums, size = log_sum_exp[..., None].contiguous(), (q.shape[1], k.shape[1])
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            *heads, sums, state, state, None, None, None, *size, 0.0, part.causal, scale=part.scale
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


CUDNN_PARTS = CudnnParts()


def _rows(xs: tuple[Tensor, ...], lengths: Lengths | None) -> tuple[list[Tensor], tuple[Tensor | None, Tensor | None]]:
    """(tensors as the kernel takes them, starts of the stretches of queries and keys).

    Tensors stay [B, S, H, K] without stretches (starts are None), else they become [B S, H, K].
    """
    if lengths is None:
        return list(xs), (None, None)
    return [x.flatten(0, 1) for x in xs], (begins(lengths[0]), begins(lengths[1]))
