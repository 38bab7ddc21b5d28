"""Decoders with mixtures of experts beside dense twins of equal FLOPs, and the parts of a mixture alone.

    python benchmarks/experts.py [--shapes coarse fine] [--micro-batch 4] [--set FIELD=VALUE] [--out experts.json]
    python benchmarks/experts.py --only-decoders --variant kernels.dispatch=null --variant trainer.graphs=true
    python benchmarks/experts.py --tiny    (small models on a CPU, for a test; its times mean nothing)

`coarse` is mplug's mixtral `8b` with 8 blocks (8 experts, 2 per token), `fine` is `fine16b` with 6 blocks (64 experts,
6 per token, 2 shared). Their twins are llamas of the same width and depth, whose MLPs multiply a token by as many
weights. `mplug bench` measures them as `mplug train` executes them, in processes of their own: sequences of 4,096
tokens, bf16 with fp32 masters, AdamW, clipping. Nothing is dropped, and the router learns.

The first table has the milliseconds of a step by kind of kernel; kernels beyond the 30 longest count as 'other'. The
second table has tokens/s, the ratio to the twin, peak memory, and how often the CPU waits for the GPU in a step. The
third table has the parts of one mixture alone, eager, for three kinds of load: even, drawn at random, and all tokens to
the same experts. A product has TFLOP/s beside its time, a movement of rows has GB/s (each byte read or written counts
once).
"""

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mplug_estimates import timed
from mplug_nn.experts import combine, dispatch
from mplug_nn.grouped import add_grouped_product, grouped_product

KINDS = {
    "grouped products": r"groupproblemshape|grouped",
    "router": r"topk|softmax|sigmoid(?!.*silu)|logsumexp|scatter_add|bitonic",
    "permute": r"mplug_triton.*rows|rows_kernel|radix|sort|searchsorted|index|gather|scatter|scan|cumsum",
}
"""Kinds of kernels by their names, in the order in which they are tried; all others keep the class of `mplug bench`."""


@dataclass(frozen=True)
class Shape:
    """A mixture of experts and its twin: settings of both, of each; width, width of an expert, experts, per token."""

    common: tuple[str, ...]
    sparse: tuple[str, ...]
    dense: tuple[str, ...]
    hidden: int
    ffn: int
    experts: int
    top_k: int


SHAPES = {
    "coarse": Shape(
        ("model.num_layers=8",),
        ("model.name=mixtral", "model.preset=8b"),
        (
            *("model.name=llama", "model.hidden_size=2048", "model.num_attention_heads=16", "model.num_kv_heads=4"),
            *("model.ffn_hidden_size=12800", "model.vocab_size=32000"),
        ),
        *(2048, 6400, 8, 2),
    ),
    "fine": Shape(
        ("model.num_layers=6",),
        ("model.name=mixtral", "model.preset=fine16b"),
        (
            *("model.name=llama", "model.hidden_size=2048", "model.num_attention_heads=16"),
            *("model.ffn_hidden_size=11264", "model.vocab_size=102400"),
        ),
        *(2048, 1408, 64, 6),
    ),
}


def tiny(shape: Shape) -> Shape:
    """The same arrangement of experts with small sizes, on a CPU."""
    small = ("model.hidden_size=64", "model.num_attention_heads=4", "model.num_kv_heads=2", "model.vocab_size=256")
    common = ("model.num_layers=2", "trainer.device=cpu", "trainer.compile=never")
    sparse = (*shape.sparse, *small, "model.ffn_hidden_size=96", "model.moe_ffn_hidden_size=32")
    dense = ("model.name=llama", *small, "model.ffn_hidden_size=96")
    return replace(shape, common=common, sparse=sparse, dense=dense, hidden=64, ffn=32)


@dataclass(frozen=True)
class Row:
    """The figures of a decoder; `kinds` are seconds of a step, `waits` the number of waits of the CPU in a step."""

    name: str
    parameters: int
    step: float
    tokens_per_s: float
    ratio: float
    memory_gib: float
    waits: dict[str, int] | None
    kinds: dict[str, float]
    longest: list[dict[str, Any]]

    def __str__(self) -> str:
        waits = "" if self.waits is None else f"{sum(self.waits.values())} {self.waits or ''}"
        return (
            f"{self.name:40}{self.parameters / 1e9:9.3f}{1e3 * self.step:10.1f}{self.tokens_per_s:12,.0f}"
            f"{self.ratio:8.3f}{self.memory_gib:8.1f}  {waits}"
        )


def decoders(name: str, shape: Shape, chosen: argparse.Namespace) -> list[Row]:
    """A twin and its mixture under every variant; one that cannot run here is left out, and `mplug bench` says why."""
    found = {f"{name}, dense": bench(shape.dense, shape, chosen)}
    for variant in ("", *chosen.variant):
        settings = (*shape.sparse, *chosen.sparse, *variant.split())
        found[f"{name}, {variant or 'experts'}"] = bench(settings, shape, chosen)
    return [
        row(title, figures, found[f"{name}, dense"] or figures)
        for title, figures in found.items()
        if figures is not None
    ]


def bench(settings: tuple[str, ...], shape: Shape, chosen: argparse.Namespace) -> dict[str, Any] | None:
    """The figures of `mplug bench` for one decoder, or None if it fails."""
    samples, length = (2, 64) if chosen.tiny else (chosen.micro_batch, 4096)
    fixed = [*shape.common, f"trainer.seq_length={length}", f"trainer.global_batch_size={samples}"]
    fixed += [f"trainer.micro_batch_size={samples}", *chosen.set, *settings]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "bench.json")
        command = [sys.executable, "-m", "mplug", "bench", "--profile", "--out", str(out)]
        command += ["--steps", str(chosen.steps), "--warmup", str(chosen.warmup), "--rounds", str(chosen.rounds)]
        if not chosen.tiny:
            command += ["--kernels", "triton", "--attention", chosen.attention, "--precision", "bf16"]
            command += ["--set", "trainer.device=cuda"]
        for setting in fixed:
            command += ["--set", setting]
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
            return None
        figures: dict[str, Any] = json.loads(out.read_text())["variants"][""]
        return figures


def row(name: str, figures: dict[str, Any], dense: dict[str, Any]) -> Row:
    """A row of the first two tables, from the figures of `mplug bench`."""
    profile, rate = figures["profile"], figures["tokens_per_s_per_gpu"]
    return Row(
        name,
        figures["parameters"],
        figures["median_s"],
        rate,
        rate / dense["tokens_per_s_per_gpu"],
        figures["memory_gib"],
        figures["waits"],
        kinds(profile),
        profile["longest"],
    )


def kinds(profile: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step by kind: the classes of a profile, without those of its kernels that are of a kind in KINDS."""
    found = dict(profile["classes"])
    for kernel in profile["longest"]:
        kind = next((kind for kind, words in KINDS.items() if re.search(words, kernel["name"].lower())), None)
        if kind is not None and kernel["kind"] in found:
            found[kernel["kind"]] -= kernel["seconds"]
            found[kind] = found.get(kind, 0.0) + kernel["seconds"]
    return {kind: seconds for kind, seconds in found.items() if seconds > 1e-6}


# The parts of one mixture.


@dataclass(frozen=True)
class Part:
    """The seconds of a part under a load, the work in FLOPs or bytes, and the unit of the work's rate."""

    shape: str
    load: str
    name: str
    seconds: float | None
    work: float
    unit: str
    reason: str = ""

    def __str__(self) -> str:
        if self.seconds is None:
            return f"{self.shape:8}{self.load:8}{self.name:34}{self.reason}"
        rate = self.work / self.seconds / (1e12 if self.unit == "TFLOP/s" else 1e9)
        return f"{self.shape:8}{self.load:8}{self.name:34}{1e3 * self.seconds:10.3f}{rate:10,.0f} {self.unit}"


def loads(tokens: int, experts: int, top_k: int, device: str) -> dict[str, Tensor]:
    """The chosen experts [N, k] under each kind of load."""
    number = torch.arange(tokens * top_k, device=device)
    generator = torch.Generator(device).manual_seed(0)
    skew = torch.randn(experts, device=device, generator=generator) * 0.5
    drawn = torch.rand(tokens, experts, device=device, generator=generator).log().neg().log().neg() + skew
    return {
        "even": (number % experts).view(tokens, top_k),
        "drawn": drawn.topk(top_k, dim=-1).indices,
        "one": torch.arange(top_k, device=device).expand(tokens, top_k).contiguous(),
    }


def parts(name: str, shape: Shape, chosen: argparse.Namespace) -> list[Part]:
    """The products and the movements of rows of one mixture, each alone."""
    device, dtype = ("cpu", torch.float32) if chosen.tiny else ("cuda", torch.bfloat16)
    tokens = 64 if chosen.tiny else chosen.micro_batch * 4096
    x = torch.randn(tokens, shape.hidden, device=device, dtype=dtype)
    up = torch.randn(shape.experts, 2 * shape.ffn, shape.hidden, device=device, dtype=dtype) * 0.02
    down = torch.randn(shape.experts, shape.hidden, shape.ffn, device=device, dtype=dtype) * 0.02
    gates = torch.rand(tokens, shape.top_k, device=device)
    found = []
    print(f"\n{'shape':8}{'load':8}{'part':34}{'ms':>10}{'rate':>10}", flush=True)
    for load, choice in loads(tokens, shape.experts, shape.top_k, device).items():
        rows, counts, _ = dispatch(x, choice, gates, shape.experts)
        ends = counts.cumsum(0).to(torch.int32)
        wide = torch.randn(len(rows), 2 * shape.ffn, device=device, dtype=dtype)
        hidden = wide[:, : shape.ffn].contiguous()
        total = torch.zeros_like(up)
        stale = torch.zeros((), dtype=torch.bool)
        moved = (len(rows) + tokens) * shape.hidden * dtype.itemsize
        flops = 2.0 * len(rows) * shape.hidden * shape.ffn
        both = partial(movement, x=x, chosen=choice, gates=gates, experts=shape.experts)
        works: dict[str, tuple[Callable[[], Any], float, str]] = {
            "up": (partial(grouped_product, rows, up, ends, True), 2 * flops, "TFLOP/s"),
            "up, gradient of rows": (partial(grouped_product, wide, up, ends, False), 2 * flops, "TFLOP/s"),
            "up, gradient of weights": (
                partial(add_grouped_product, total, stale, wide, rows, ends),
                2 * flops,
                "TFLOP/s",
            ),
            "down": (partial(grouped_product, hidden, down, ends, True), flops, "TFLOP/s"),
            "dense product of that size": (partial(torch.mm, hidden, down[0].t()), flops, "TFLOP/s"),
            "dispatch, combine, with gradients": (both(dispatch, combine), 4 * moved, "GB/s"),
        }
        fused = fused_movement() if device == "cuda" else None
        if fused is not None:
            works["the same by kernels/triton"] = (both(*fused), 4 * moved, "GB/s")
        for part, (work, amount, unit) in works.items():
            found.append(measured(name, load, part, work, amount, unit, device))
            print(found[-1], flush=True)
    return found


def movement(
    send: Callable[..., Any], fetch: Callable[..., Any], x: Tensor, chosen: Tensor, gates: Tensor, experts: int
) -> Callable[[], None]:
    """Rows to their experts and back, forward and backward."""
    x, gates = x.detach().requires_grad_(), gates.detach().requires_grad_()
    gradient = torch.randn_like(x)

    def work() -> None:
        rows, _, route = send(x, chosen, gates, experts)
        fetch(rows, gates, route).backward(gradient)
        x.grad = gates.grad = None

    return work


def fused_movement() -> tuple[Any, Any] | None:
    """dispatch and combine of kernels/triton, where it offers them."""
    try:
        made = importlib.import_module("mplug_triton.rows")
    except ImportError:
        return None
    return made.dispatch, made.combine


def measured(shape: str, load: str, name: str, work: Callable[[], Any], amount: float, unit: str, device: str) -> Part:
    """The median of 10 calls after 3; a part that cannot run here has its reason instead."""
    try:
        timed(work, 3, device)
        return Part(shape, load, name, median(timed(work, 10, device)), amount, unit)
    except Exception as error:  # a kernel that refuses this machine: the others are measured
        return Part(shape, load, name, None, amount, unit, f"none: {str(error).partition(chr(10))[0]}")


def main() -> None:
    """Measure and print the tables, those of a shape as soon as it is measured."""
    chosen = options()
    rows: list[Row] = []
    alone: list[Part] = []
    for name in chosen.shapes:
        shape = tiny(SHAPES[name]) if chosen.tiny else SHAPES[name]
        if not chosen.only_parts:
            rows += decoders(name, shape, chosen)
            report([one for one in rows if one.name.startswith(f"{name}, ")], chosen.longest)
        if not chosen.only_decoders:
            alone += parts(name, shape, chosen)
        if chosen.out:
            figures = {"decoders": [asdict(one) for one in rows], "parts": [asdict(one) for one in alone]}
            Path(chosen.out).write_text(json.dumps(figures, indent=1))


def report(rows: list[Row], longest: int) -> None:
    """Print the longest kernels, and the first two tables."""
    for one in rows:
        if longest:
            print(f"\nlongest kernels of {one.name}: ms per step, calls, class")
        for kernel in one.longest[:longest]:
            print(f"{1e3 * kernel['seconds']:8.2f}{kernel['calls']:7.0f}  {kernel['kind']:20}{kernel['name'][:110]}")
    every = dict.fromkeys(kind for one in rows for kind in one.kinds)
    print("\nms per step of " + ", ".join(f"({number}) {one.name}" for number, one in enumerate(rows)))
    print(f"{'':22}" + "".join(f"{f'({number})':>9}" for number in range(len(rows))))
    for kind in sorted(every, key=lambda kind: -max(one.kinds.get(kind, 0.0) for one in rows)):
        print(f"{kind:22}" + "".join(f"{1e3 * one.kinds.get(kind, 0.0):9.2f}" for one in rows))
    print(f"\n{'decoder':40}{'billions':>9}{'ms':>10}{'tokens/s':>12}{'ratio':>8}{'GiB':>8}  waits")
    print(*rows, sep="\n", flush=True)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--micro-batch", type=int, default=4, help="samples of 4,096 tokens in a step")
    parser.add_argument("--attention", default="flash", help="kernel of attention: flash, sdpa (cuDNN)")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a round")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], help="a setting of both decoders")
    parser.add_argument("--sparse", action="append", default=[], help="a setting of the decoder with experts alone")
    parser.add_argument("--variant", action="append", default=[], help="measure the decoder with experts so too")
    parser.add_argument("--longest", type=int, default=12, help="kernels of each decoder that are printed")
    parser.add_argument("--only-parts", action="store_true", help="leave out the decoders")
    parser.add_argument("--only-decoders", action="store_true", help="leave out the parts")
    parser.add_argument("--tiny", action="store_true", help="small models on a CPU")
    parser.add_argument("--out", help="file for the figures, in JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
