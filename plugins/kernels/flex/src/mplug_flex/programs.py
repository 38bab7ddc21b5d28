"""flex_attention's forward and backward pass as programs: traced once, and on a GPU compiled once by inductor.

B batch, S queries, T keys, H query heads, G KV heads, K head dim, V value width, R reach of a relative bias.

The public function `flex_attention` gives no separate access to its backward pass, requires torch's compiler around it,
and refuses gradients on a CPU. So the programs are traced from the two operators below it, which both have explicit
arguments for tensors that the score function reads. Backward receives the output and the log-sum-exp of the whole
attention. They may come from several parts of the keys, or include attention sinks: with P = exp(scores - log-sum-exp),
its formulas hold for both.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mplug_flex.masks import Form, Mask, places_among
from mplug_nn.specification import ALIBI, RELATIVE

OPTIONS = {
    "BACKEND": "TRITON",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}
"""The options that the public function would set, for the kernel that has a backward pass for every form."""
SMALL_TILES = {
    "fwd_BLOCK_M": 64,
    "fwd_BLOCK_N": 32,
    "fwd_num_stages": 2,
    "bwd_BLOCK_M1": 32,
    "bwd_BLOCK_N1": 64,
    "bwd_BLOCK_M2": 64,
    "bwd_BLOCK_N2": 32,
    "bwd_num_stages": 1,
}
"""Tiles that fit into shared memory up to a width of 256, in half precision."""
SMALL_TILES_OF_FP32 = {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 16, "fwd_num_stages": 2}
SHARERS = 32
"""The number of queries whose pairs are added to one copy of the gradient of a relative bias.

The kernel adds every pair of a query and a key to the number of its distance, atomically. The last range holds most
pairs, so with a single table they would wait for one another.
"""
LN2 = math.log(2)
"""The operators' log-sum-exps are to the base 2."""
Program = Callable[..., tuple[Tensor, ...]]
PROGRAMS: dict[Any, Program] = {}
"""(direction, form, shapes, strides, dtypes and devices of its tensors) -> program."""


def forward_program(form: Form, mask: Mask, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bias: Tensor) -> Program:
    """The program (q, k, v, sinks, bias, numbers, blocks) -> (output [B, S, H, V], log-sum-exp [B, H, S]).

    `bias` are the slopes [H] or the table [H, 2R + 1]. Tensors that the form does not use are empty.
    """
    counts = (5, len(mask.numbers))

    def compute(*tensors: Tensor) -> tuple[Tensor, ...]:
        (q, k, v, sinks, bias), numbers, blocks = _split(tensors, *counts)
        score, more = _score(form, bias, k.shape[1] - q.shape[1])
        heads = (x.transpose(1, 2) for x in (q, k, v))
        with _indexed():
            output, sums, *_ = _operators(q.device)[0](
                *heads, score, _blocks(form, mask, blocks, q, k), form.scale, _options(q, v), more, numbers
            )
        sums = sums.to(_wide(q)) * LN2
        output = output.transpose(1, 2)
        if sinks.numel():
            whole = torch.logaddexp(sums, sinks.to(_wide(q))[:, None])
            output = (output * (sums - whole).exp().transpose(1, 2)[..., None]).to(q.dtype)
            sums = whole
        return output.contiguous(), sums.contiguous()

    return _program("forward", form, compute, (q, k, v, sinks, bias, *mask.numbers, *mask.tensors))


def backward_program(form: Form, mask: Mask, own: Sequence[Tensor], trained: bool) -> Program:
    """The program (q, k, v, output, sums, gradient, sinks, bias, numbers, blocks) -> gradients.

    `own` are the first eight. The gradients are those of q, k, v, sinks and bias, in these shapes. The gradient of the
    sinks is empty if the form has none. A `trained` bias is `copies_of` a table, and the gradient is the table's; that
    of another bias is empty.
    """
    counts = (8, len(mask.numbers))

    def compute(*tensors: Tensor) -> tuple[Tensor, ...]:
        (q, k, v, output, sums, gradient, sinks, bias), numbers, blocks = _split(tensors, *counts)
        score, more = _score(form, bias, k.shape[1] - q.shape[1])
        heads = [x.transpose(1, 2) for x in (q, k, v, output)]
        graphs = _differentiated(score, heads[0], more)
        given = (*heads, sums / LN2, gradient.transpose(1, 2), None)
        with _indexed():
            dq, dk, dv, captured = _operators(q.device)[1](
                *given, *graphs, _blocks(form, mask, blocks, q, k), form.scale, _options(q, v), more, numbers
            )
        of_heads = (x.transpose(1, 2).contiguous() for x in (dq, dk, dv))
        of_bias = captured[0].sum(dim=0) if trained else bias.new_empty(0)
        return *of_heads, _of_sinks(output, sums, gradient, sinks), of_bias

    return _program("backward", form, compute, (*own, *mask.numbers, *mask.tensors))


def copies_of(table: Tensor, queries: int) -> Tensor:
    """The table [H, 2R + 1] once for every so many queries: [S / SHARERS, H, 2R + 1], as a leaf with a gradient."""
    return table.detach().expand(-(-queries // SHARERS), -1, -1).contiguous().requires_grad_()


def _of_sinks(output: Tensor, sums: Tensor, gradient: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of the sinks [H]: a sink's weight has no value, so it only takes weight from the others."""
    if not sinks.numel():
        return sinks.new_empty(0)
    wide = _wide(output)
    inner = (output.to(wide) * gradient.to(wide)).sum(dim=-1).transpose(1, 2)  # [B, H, S]
    weights = (sinks.to(wide)[:, None] - sums).exp()
    return -(weights * inner).sum(dim=(0, 2)).to(sinks.dtype)


def _operators(device: torch.device) -> tuple[Any, Any]:
    """(forward, backward); on a CPU the matrix products and elementwise operations behind the operators."""
    if device.type == "cpu":  # inductor has no backward pass there
        from torch._higher_order_ops.flex_attention import sdpa_dense, sdpa_dense_backward

        return sdpa_dense, sdpa_dense_backward
    from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward

    return flex_attention, flex_attention_backward


def _options(q: Tensor, v: Tensor) -> dict[str, Any]:
    """The kernel's options; torch chooses tiles by the key width, and for powers of two only."""
    widths = {q.shape[-1], v.shape[-1]}
    if max(widths) <= 64 or widths in ({128}, {256}):
        return OPTIONS
    return OPTIONS | (SMALL_TILES_OF_FP32 if q.dtype == torch.float32 else SMALL_TILES)


def _indexed() -> Any:
    """The mode in which score and mask functions may index tensors by tensors."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


def _split(
    tensors: tuple[Tensor, ...], count: int, numbers: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    return tensors[:count], tensors[count : count + numbers], tensors[count + numbers :]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _score(form: Form, bias: Tensor, shift: int) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The score function with `shift` more keys than queries, and the tensors that it receives last.

    `bias` are slopes [H], a table [H, 2R + 1], or copies of the table for groups of queries [N, H, 2R + 1].
    """
    reach = bias.shape[-1] // 2

    def score(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor, *more: Tensor) -> Tensor:
        if form.soft_cap is not None:
            score = form.soft_cap * torch.tanh(score / form.soft_cap)
        distance = key - query - shift
        if form.bias == ALIBI:
            score = score - more[0][h] * distance.abs()
        if form.bias == RELATIVE:
            own = (query // SHARERS,) if bias.dim() == 3 else ()
            score = score + more[0][(*own, h, distance.clamp(-reach, reach) + reach)]
        return score

    return score, (bias,) if form.bias else ()


def _blocks(form: Form, mask: Mask, blocks: tuple[Tensor, ...], q: Tensor, k: Tensor) -> tuple[Any, ...]:
    """The block mask, with the function that tells the pairs of a partial block apart."""
    shift = k.shape[1] - q.shape[1]

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor, *numbers: Tensor) -> Tensor:
        seen = query >= 0
        distance = query + shift - key
        if form.placed:
            of_queries, of_keys = places_among(form, numbers)
            distance = of_queries[query] - of_keys[key]
        if form.grouped:
            own, other = numbers[-2][b, query], numbers[-1][b, key]
            seen = seen & ((distance >= 0) | ((own == other) & (own >= 0)))
        elif form.causal:
            seen = seen & (distance >= 0)
        if form.window is not None:
            seen = seen & ((distance if form.grouped else distance.abs()) < form.window)
        if form.packed:
            seen = seen & (numbers[0][b, query] == numbers[1][b, key])
        return seen

    return (*mask.blocks_of(list(blocks)), sees)


def _differentiated(score: Callable[..., Tensor], q: Tensor, more: tuple[Tensor, ...]) -> tuple[Any, Any]:
    """The score function, and the graph of its derivative."""
    from torch._higher_order_ops.flex_attention import create_fw_bw_graph

    indices = (q.new_zeros((), dtype=torch.int) for _ in range(4))
    values = (q.new_zeros((), requires_grad=True), *indices)
    with torch.enable_grad(), _indexed():
        graphs: tuple[Any, Any] = create_fw_bw_graph(score, values, more)
    return graphs


def _program(direction: str, form: Form, compute: Program, tensors: tuple[Tensor, ...]) -> Program:
    on_cpu = tensors[0].device.type == "cpu"  # where a program is not compiled, and serves any strides
    key = (direction, form, *((x.shape, None if on_cpu else x.stride(), x.dtype, x.device) for x in tensors))
    if key not in PROGRAMS:
        PROGRAMS[key] = _in_thread(_traced if on_cpu else _compiled, compute, tensors)
    return PROGRAMS[key]


def _in_thread(make: Callable[..., Program], compute: Program, tensors: tuple[Tensor, ...]) -> Program:
    """The result of `make` in another thread: operators are called under modes of torch that disturb a tracer."""
    return _thread().submit(make, compute, tensors).result()


@cache
def _thread() -> ThreadPoolExecutor:
    """One thread until the process ends. Torch 2.11 crashes in backward after a thread that has traced ends."""
    return ThreadPoolExecutor(1)


def _traced(compute: Program, tensors: tuple[Tensor, ...], mode: str = "real") -> Program:
    """The operations of a function on tensors like these; with mode 'fake', it is traced without their values."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        return make_fx(compute, tracing_mode=mode)(*tensors)


def _compiled(compute: Program, tensors: tuple[Tensor, ...]) -> Program:
    """The function compiled by inductor, for tensors of these shapes and strides."""
    from torch._inductor import compile as compile_by_inductor

    with torch.no_grad(), torch.cuda.device(tensors[0].device):
        compiled: Program = compile_by_inductor(_traced(compute, tensors, mode="fake"), list(tensors))
    return compiled
