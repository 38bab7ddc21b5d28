"""A GPT trained by plain PyTorch in one process: what `mplug bench --against benchmarks/yardstick.py` compares with.

What a good engineer writes by hand: fused QKV, cuDNN's attention or flash-attn-4, every unit compiled, bf16 weights
with fp32 masters and moments, fused AdamW, clipping that waits for nothing. The gradients of a step's only micro batch
are bf16, as autograd leaves them; those of several are summed in fp32. So its arithmetic is mplug's up to the rounding
of one micro batch's gradients.

Any script can take part that reads one JSON object from stdin:

    model, optimizer   the fields of these sections of the config; null where a field follows from others; `frozen` is
                       there only if something is
    seq_length, micro_batch_size, micro_batches (of a step), max_grad_norm (0: no clipping), seed
    precision          "fp32" or "bf16"
    device             "cpu" or "cuda"
    attention          the kernel that attends, here "sdpa" or "flash"
    attention_by       what that kernel uses: "cuDNN", "torch's choice" or "torch's matrix products", "flash-attn-4"
    deterministic      false: there is no other way here
    compile            torch.compile's backend, or "never"; "auto" is inductor on a GPU
    warmup, steps, profile   how many steps of each; where all are 0, it only counts

and prints one on its last line: `parameters`; `flops` of a step (6 a token and weight of a matrix product, causal
attention once); `seconds` of each of `steps`; `memory_gib`; and, on a GPU, `events` of the steps to `profile`, [name,
start, end] of each kernel in seconds. What it cannot do it says on stderr, and exits with another status than 0.

B batch, S sequence, D embed, H query heads, G KV heads, K head dim, F mlp, V vocab.
"""

import json
import resource
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

MATRIX_PRODUCTS = "torch's matrix products"
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "position": ("learned", "rotary"),
    "activation": ("gelu", "gelu_tanh", "swiglu"),
    "norm": ("layernorm", "rmsnorm"),
    "dropout": (0,),
    "attention_dropout": (0,),
    "optimizer": ("adamw",),
    "precision": ("fp32", "bf16"),
    "device": ("cpu", "cuda"),
    "attention": ("sdpa", "flash"),
    "attention_by": ("cuDNN", "torch's choice", MATRIX_PRODUCTS, "flash-attn-4"),
    "deterministic": (False,),
    "mup_base": (None,),
}
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass
class Shape:
    """The fields of the model's section."""

    name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int | None
    head_dim: int | None
    ffn_hidden_size: int | None
    vocab_size: int
    position: str
    max_position_embeddings: int
    rope_theta: float
    qk_norm: bool
    activation: str
    norm: str
    norm_eps: float
    tie_embeddings: bool
    bias: bool
    dropout: float
    attention_dropout: float
    init_std: float
    mup_base: dict[str, int] | None

    def __post_init__(self) -> None:
        self.num_kv_heads = self.num_kv_heads or self.num_attention_heads
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        wide = 4 * self.hidden_size
        wide = -(-wide * 2 // 3 // 64) * 64 if self.activation == "swiglu" else wide
        self.ffn_hidden_size = self.ffn_hidden_size or wide


def shape_of(task: dict[str, Any]) -> Shape:
    """The model's shape; exits with a sentence if this script does not support the task."""
    if different := task["model"].keys() ^ {field.name for field in fields(Shape)}:
        sys.exit(f"this script supports other fields of a model; these differ: {', '.join(sorted(different))}")
    values = {**task, **task["model"], "optimizer": task["optimizer"]["name"]}
    for field, supported in SUPPORTED.items():
        if values[field] not in supported:
            sys.exit(f"this script does not support {field} {values[field]!r}, only {', '.join(map(repr, supported))}")
    return Shape(**task["model"])


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention: q [B, S, H, K], k and v [B, S, G, K] -> [B, S, H, K]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by flash-attn-4."""
    return torch.ops.yardstick.flash(q, k, v)[0]


def define_flash() -> None:
    """Make flash-attn-4's `flash_attn_func` operators, which torch.compile calls instead of tracing."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    @torch.library.custom_op("yardstick::flash", mutates_args=())
    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(_flash_attn_fwd(q, k, v, causal=True, return_lse=True)[:2])

    @torch.library.custom_op("yardstick::flash_backward", mutates_args=())
    def backward(y: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(_flash_attn_bwd(q, k, v, o, y.contiguous(), lse, causal=True)[:3])

    @forward.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return q.new_empty(q.shape), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)

    @backward.register_fake
    def _(y: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    forward.register_autograd(
        lambda ctx, grad, _: backward(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, the halves of a head paired: x [B, S, H, K], cos and sin [S, 1, K/2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def norm(shape: Shape) -> nn.Module:
    if shape.norm == "rmsnorm":
        return nn.RMSNorm(shape.hidden_size, shape.norm_eps)
    return nn.LayerNorm(shape.hidden_size, shape.norm_eps, bias=shape.bias)


class Embedding(nn.Module):
    """Tokens [B, S] -> [B, S, D]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocab_size, shape.hidden_size)
        learned = shape.position == "learned"
        self.position = nn.Embedding(shape.max_position_embeddings, shape.hidden_size) if learned else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up."""
        x = self.token(tokens)  # [B, S, D]
        return x if self.position is None else x + self.position.weight[: tokens.shape[1]]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): [B, S, D] -> [B, S, D]."""

    def __init__(self, shape: Shape, attention: str) -> None:
        super().__init__()
        width, ffn, self.activation = shape.hidden_size, shape.ffn_hidden_size, shape.activation
        self.attend = flash if attention == "flash" else sdpa
        self.heads = (shape.num_attention_heads, shape.num_kv_heads, shape.num_kv_heads)
        self.norm1, self.norm2 = norm(shape), norm(shape)
        self.qkv = nn.Linear(width, sum(self.heads) * shape.head_dim, shape.bias)
        self.q_norm = nn.RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else nn.Identity()
        self.out = nn.Linear(self.heads[0] * shape.head_dim, width, shape.bias)
        self.up = nn.Linear(width, 2 * ffn if self.activation == "swiglu" else ffn, shape.bias)
        self.down = nn.Linear(ffn, width, shape.bias)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        """Where there are no rotary positions, `cos` and `sin` are None."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (sum(self.heads), -1))  # [B, S, H + 2G, K]
        q, k, v = heads.split(self.heads, dim=2)
        q, k = self.q_norm(q), self.k_norm(k)
        if cos is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        x = x + self.out(self.attend(q, k, v).flatten(2))
        h = self.up(self.norm2(x))  # [B, S, F], swiglu: [B, S, 2F], gate first
        if self.activation == "swiglu":
            gate, up = h.chunk(2, dim=-1)
            return x + self.down(F.silu(gate) * up)
        return x + self.down(F.gelu(h, approximate="tanh" if self.activation == "gelu_tanh" else "none"))


class Head(nn.Module):
    """[B, S, D] and labels [B, S] -> the sum of the losses."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm, self.project = norm(shape), nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The logits of a micro batch exist at once."""
        logits = self.project(self.norm(x)).float()  # [B, S, V]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class GPT(nn.Module):
    """Tokens and labels [B, S] -> the sum of the losses."""

    def __init__(self, shape: Shape, seq_length: int, attention: str) -> None:
        super().__init__()
        self.embedding, self.head = Embedding(shape), Head(shape)
        self.blocks = nn.ModuleList(Block(shape, attention) for _ in range(shape.num_layers))
        if shape.tie_embeddings:
            self.head.project.weight = self.embedding.token.weight
        half = shape.head_dim // 2
        angles = torch.arange(seq_length)[:, None, None] * shape.rope_theta ** (-torch.arange(half) / half)
        rotary = shape.position == "rotary"
        self.register_buffer("cos", angles.cos() if rotary else None, persistent=False)  # [S, 1, K/2]
        self.register_buffer("sin", angles.sin() if rotary else None, persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Embedding, blocks, head."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(x, labels)


class Trainer:
    """AdamW on fp32 masters, of which the model's weights are the bf16 copies (fp32: the weights themselves)."""

    def __init__(self, model: GPT, task: dict[str, Any]) -> None:
        self.model, self.max_norm, adamw = model, task["max_grad_norm"], task["optimizer"]
        self.masters = self.weights = list(model.parameters())
        if task["precision"] == "bf16":
            self.masters = [nn.Parameter(weight.detach().clone()) for weight in self.weights]
            model.bfloat16()
        decayed = {"params": [master for master in self.masters if master.dim() > 1]}
        plain = {"params": [master for master in self.masters if master.dim() < 2], "weight_decay": 0.0}
        options = {name: adamw[name] for name in ("lr", "eps", "weight_decay")}
        self.adamw = torch.optim.AdamW([decayed, plain], betas=(adamw["beta1"], adamw["beta2"]), fused=True, **options)

    def step(self, windows: Tensor) -> Tensor:
        """Train on a step's micro batches, windows [micro batches, B, S + 1]; its mean loss."""
        losses, grads = [], []
        for window in windows:
            loss = self.model(window[:, :-1], window[:, 1:]) / windows[..., 1:].numel()
            loss.backward()
            losses.append(loss.detach())
            found = [weight.grad for weight in self.weights]
            if grads:
                torch._foreach_add_(grads, found)
            else:
                grads = [grad.float() for grad in found] if len(windows) > 1 else found
            self.model.zero_grad()
        self.update(grads)
        return torch.stack(losses).sum()

    @torch.no_grad()
    def update(self, grads: list[Tensor]) -> None:
        """Clip by the global norm, update masters, round them into the weights."""
        if self.max_norm > 0:  # the fused kernel divides gradients by grad_scale
            total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, torch.float32)))
            self.adamw.grad_scale = ((total + 1e-6) / self.max_norm).clamp(min=1.0)
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad.float()
        self.adamw.step()
        self.adamw.zero_grad()
        if self.masters is not self.weights:
            torch._foreach_copy_(self.weights, self.masters)


def build(task: dict[str, Any], shape: Shape) -> Trainer:
    torch.manual_seed(task["seed"])
    with torch.device(task["device"]):
        model = GPT(shape, task["seq_length"], task["attention"])
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=shape.init_std)
    automatic = "inductor" if task["device"] == "cuda" else "never"
    backend = automatic if task["compile"] == "auto" else task["compile"]
    for unit in (model.embedding, *model.blocks, model.head) if backend != "never" else ():
        unit.compile(backend=backend, fullgraph=True, dynamic=False)
    return Trainer(model, task)


def count(task: dict[str, Any], shape: Shape) -> dict[str, int]:
    with torch.device("meta"):
        model = GPT(shape, task["seq_length"], task["attention"])
    weights = sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear))
    pairs = shape.num_layers * shape.num_attention_heads * shape.head_dim * task["seq_length"]
    tokens = task["micro_batches"] * task["micro_batch_size"] * task["seq_length"]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, "flops": 6 * (weights + pairs) * tokens}


def measure(task: dict[str, Any], shape: Shape) -> dict[str, Any]:
    trainer, on_gpu, steps = build(task, shape), task["device"] == "cuda", task["warmup"] + task["steps"]
    of_a_step = (task["micro_batches"], task["micro_batch_size"], task["seq_length"] + 1)
    windows = torch.randint(shape.vocab_size, (steps + task["profile"], *of_a_step), device=task["device"])
    losses, moments = [trainer.step(window) for window in windows[: task["warmup"]]], [moment(on_gpu)]
    for window in windows[task["warmup"] : steps]:
        losses.append(trainer.step(window))
        moments.append(moment(on_gpu))
    found = {"losses": torch.stack(losses).tolist()}  # which waits for the last step
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    found["memory_gib"] = (torch.cuda.max_memory_allocated() if on_gpu else resident) / 2**30
    found["seconds"] = [
        before.elapsed_time(after) / 1e3 if on_gpu else after - before for before, after in pairwise(moments)
    ]
    return found | ({"events": kernels(trainer, windows[steps:])} if on_gpu and task["profile"] else {})


def moment(on_gpu: bool) -> Any:
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def kernels(trainer: Trainer, windows: Tensor) -> list[tuple[str, float, float]]:
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        torch.cuda._sleep(500_000_000)  # so that the first step is launched before it begins
        for window in windows:
            trainer.step(window)
        torch.cuda.synchronize()
    events = [event for event in profiled.events() if event.device_type.name == "CUDA" and not event.is_user_annotation]
    return [(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6) for event in events]


def backends_of(task: dict[str, Any]) -> AbstractContextManager[None]:
    """Where F.scaled_dot_product_attention uses what the task names."""
    if task["attention_by"] == MATRIX_PRODUCTS:
        return sdpa_kernel(SDPBackend.MATH)
    return sdpa_kernel(BACKENDS, set_priority=True) if task["device"] == "cuda" else nullcontext()


def main() -> None:
    task = json.load(sys.stdin)
    shape = shape_of(task)
    if task["attention"] == "flash":
        define_flash()
    found = count(task, shape)
    if task["warmup"] + task["steps"]:
        with backends_of(task):
            found |= measure(task, shape)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
