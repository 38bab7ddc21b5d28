"""The Triton kernel of SwiGLU's gradient. N rows, F width."""
# ruff: noqa: N803 (compile-time constants are in capitals, as is usual in Triton)

import triton
import triton.language as tl


@triton.jit
def triton_swiglu_gradient(grad_y, x, grad_x, F: tl.constexpr, BLOCK: tl.constexpr):
    """grad_x [N, 2F] from grad_y [N, F] and x [N, 2F] (gate first), in fp32; a program has BLOCK numbers of a row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < F
    grad = tl.load(grad_y + row * F + i, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x + row * 2 * F + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + i, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    value = gate * share
    tl.store(grad_x + row * 2 * F + i, grad * up * (share + value * (1.0 - share)), mask=inside)
    tl.store(grad_x + row * 2 * F + F + i, grad * value, mask=inside)
