"""A hybrid of gated delta nets and attention beside a dense decoder of the same size, and the mixer's layer alone.

    python benchmarks/mixers.py [--lengths 4096 32768] [--attention sdpa] [--recompute full] [--out mixers.json]
    python benchmarks/mixers.py --tiny    (small models on a CPU, for a test; its times mean nothing)

Both decoders have 1.7 billion parameters, 28 blocks of width 2048 and the vocabulary of Qwen3. In the hybrid, three of
four blocks have a gated delta net (8 key heads, 16 value heads of 128) instead of attention, and all MLPs are narrower
by 512, so that the sizes are equal. `mplug bench` measures them as `mplug train` executes them, in processes of their
own, which take turns; a step has 16,384 tokens at length 4,096 and one sample at 32,768, with recomputation of whole
blocks. Random tokens, bf16 with fp32 masters, AdamW, clipping.

The first table has, for each length: tokens/s, MFU (A = 6; a scan counts its recurrence only), peak memory, the part of
a step in kernels of scans and convolutions, and the ratio of tokens/s to the dense decoder's. The second table has the
forward and backward pass of one mixer, compiled, beside `fla.layers.GatedDeltaNet` of flash-linear-attention of the
same shape, if the package is installed; and of mplug's mixer in plain torch.
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mplug.training.hardware import peak_memory_gib, timed
from mplug_nn import GatedDeltaNet, chunked_scan, short_convolution

PATTERN = "model.mixer_types=[gated_delta,gated_delta,gated_delta,attention]"
DENSE = "dense"
HYBRID = "hybrid"


@dataclass(frozen=True)
class Shape:
    """The shapes of both decoders: the hidden size, key and value heads of a mixer, and their width."""

    hidden: int
    key_heads: int
    value_heads: int
    width: int
    model: tuple[str, ...]
    hybrid: tuple[str, ...]
    tokens: int


LARGE = Shape(
    2048,
    8,
    16,
    128,
    ("model.name=qwen", "model.preset=3-1.7b"),
    ("model.ffn_hidden_size=5632", "model.linear_num_key_heads=8", "model.linear_num_value_heads=16"),
    16384,
)
SMALL = Shape(
    64,
    2,
    4,
    16,
    (
        "model.name=qwen",
        "model.hidden_size=64",
        "model.num_layers=4",
        "model.num_attention_heads=4",
        "model.num_kv_heads=2",
        "model.head_dim=16",
        "model.ffn_hidden_size=128",
        "model.vocab_size=256",
        "trainer.device=cpu",
        "trainer.compile=never",
    ),
    ("model.linear_num_key_heads=2", "model.linear_num_value_heads=4"),
    64,
)


@dataclass(frozen=True)
class Row:
    """The figures of a decoder at a length."""

    name: str
    length: int
    parameters: int
    tokens_per_s: float
    mfu: float | None
    memory_gib: float
    scan: float | None
    ratio: float

    def __str__(self) -> str:
        mfu = "" if self.mfu is None else f"{100 * self.mfu:.1f}%"
        scan = "" if self.scan is None else f"{100 * self.scan:.1f}%"
        return (
            f"{self.length:>8}  {self.name:8}{self.parameters / 1e9:9.3f}{self.tokens_per_s:12,.0f}{mfu:>8}"
            f"{self.memory_gib:8.1f}{scan:>8}{self.ratio:8.3f}"
        )


@dataclass(frozen=True)
class Pass:
    """The seconds of forward and backward of a mixer over a batch of samples, or why there are none."""

    name: str
    length: int
    seconds: float | None
    memory_gib: float | None
    reason: str = ""

    def __str__(self) -> str:
        times = self.reason if self.seconds is None else f"{1e3 * self.seconds:10.2f}{self.memory_gib:8.1f}"
        return f"{self.length:>8}  {self.name:44}{times}"


def decoders(shape: Shape, length: int, chosen: argparse.Namespace) -> list[Row]:
    """Both decoders at a length, by one call of `mplug bench`."""
    samples = max(1, shape.tokens // length)
    hybrid = [PATTERN, *shape.hybrid, *chosen.hybrid]
    fixed = [
        *shape.model,
        f"trainer.seq_length={length}",
        f"trainer.global_batch_size={samples}",
        f"trainer.micro_batch_size={samples}",
        f"memory.recompute.mode={chosen.recompute or ('full' if samples * length > LARGE.tokens else 'none')}",
    ]
    if not chosen.tiny:
        fixed += ["trainer.precision=bf16", f"kernels.attention={chosen.attention}"]
        fixed += [f"kernels.{kind}=triton" for kind in ("qk", "norm")]
        hybrid += [f"kernels.scan={chosen.scan}", f"kernels.convolution={chosen.scan}"]
        if chosen.scan == "fla":
            hybrid.append("kernels.fla.experimental=true")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "bench.json")
        command = [sys.executable, "-m", "mplug", "bench", "--profile", "--out", str(out)]
        command += ["--steps", str(chosen.steps), "--warmup", str(chosen.warmup), "--rounds", str(chosen.rounds)]
        for setting in (*fixed, *chosen.set):
            command += ["--set", setting]
        for variant in ("", " ".join(hybrid)):
            command += ["--variant", variant]
        subprocess.run(command, check=True)
        dense, mixed = json.loads(out.read_text())["variants"].values()
    return [row(DENSE, length, dense, dense), row(HYBRID, length, mixed, dense)]


def row(name: str, length: int, figures: dict[str, Any], dense: dict[str, Any]) -> Row:
    """A row of the first table from the figures of `mplug bench`."""
    rate, classes = figures["tokens_per_s_per_gpu"], figures["profile"]["classes"]
    part = classes["scan"] / sum(classes.values()) if "scan" in classes else None
    ratio = rate / dense["tokens_per_s_per_gpu"]
    return Row(name, length, figures["parameters"], rate, figures["mfu_a6"], figures["memory_gib"], part, ratio)


def layers(shape: Shape, length: int, chosen: argparse.Namespace) -> list[Pass]:
    """The mixer of mplug and the library's layer, each alone."""
    device = "cpu" if chosen.tiny else "cuda"
    dtype = torch.float32 if chosen.tiny else torch.bfloat16
    samples = max(1, shape.tokens // length)
    made: list[tuple[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]]] = []
    if not chosen.tiny:
        made.append(("mplug, compiled, kernels/fla", lambda: own(shape, "fla")))
        made.append(("mplug, eager, kernels/fla", lambda: own(shape, "fla", compiled=False)))
        made.append(("fla.layers.GatedDeltaNet", lambda: library(shape)))
    if length <= 4096:  # plain torch keeps more for backward than a GPU holds at 32,768
        made.append(("mplug, plain torch", lambda: own(shape, "plain", compiled=not chosen.tiny)))
    return [measured(name, one, shape, samples, length, device, dtype) for name, one in made]


def own(shape: Shape, kernels: str, *, compiled: bool = True) -> Callable[[torch.Tensor], torch.Tensor]:
    """mplug's mixer with its slots filled."""
    heads = shape.key_heads, shape.value_heads
    mixer = GatedDeltaNet(shape.hidden, *heads, shape.width, shape.width)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.uniform_(-0.02, 0.02)
        mixer.norm.fill_(1.0)
    scan: Any = chunked_scan
    convolution: Any = short_convolution
    if kernels == "fla":
        scans, limits = importlib.import_module("mplug_fla.scans"), importlib.import_module("mplug_fla.limits")
        if limits.missing():
            raise RuntimeError(limits.missing())
        scan = scans.scan_by_channel if limits.takes_channels(mixer.scan.spec) else scans.scan
        convolution = importlib.import_module("mplug_fla.convolution").convolution
    mixer.scan.core, mixer.conv.core = scan, convolution
    return Whole(mixer).compiled(compiled)


class Whole(nn.Module):
    """A mixer as a function of its rows alone."""

    def __init__(self, mixer: GatedDeltaNet) -> None:
        super().__init__()
        self.mixer = mixer

    def compiled(self, wanted: bool) -> "Whole":
        """This module, compiled in place if `wanted`."""
        if wanted:
            self.compile(fullgraph=True, dynamic=False)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]."""
        return self.mixer.mixed(x, None)


def library(shape: Shape) -> Callable[[torch.Tensor], torch.Tensor]:
    """flash-linear-attention's layer of the same shape."""
    layer = importlib.import_module("fla.layers.gated_deltanet").GatedDeltaNet(
        hidden_size=shape.hidden,
        head_dim=shape.width,
        num_heads=shape.key_heads,
        num_v_heads=shape.value_heads,
        expand_v=1,
    )

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x)[0]
            return y

    return Rows()


def measured(
    name: str, make: Callable[[], Any], shape: Shape, samples: int, length: int, device: str, dtype: torch.dtype
) -> Pass:
    """The median pass of 8 after 3; a layer that cannot run here has its reason instead."""
    try:
        module = make().to(device, dtype)
        x = torch.randn(samples, length, shape.hidden, device=device, dtype=dtype, requires_grad=True)
        gradient = torch.randn_like(x)

        def step() -> None:
            module(x).backward(gradient)
            module.zero_grad()
            x.grad = None

        for _ in range(3):
            step()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = sorted(timed(step, 8, device))
    except Exception as error:  # a missing package, or a kernel that refuses this machine: the others are measured
        return Pass(name, length, None, None, f"none: {str(error).partition(chr(10))[0]}")
    return Pass(name, length, seconds[len(seconds) // 2], peak_memory_gib(device))


def main() -> None:
    """Measure and print both tables."""
    chosen = options()
    shape = SMALL if chosen.tiny else LARGE
    lengths = chosen.lengths or ([64, 128] if chosen.tiny else [4096, 32768])
    rows: list[Row] = []
    passes: list[Pass] = []
    try:
        for length in lengths:
            if not chosen.only_layers:
                rows += decoders(shape, length, chosen)
            passes += layers(shape, length, chosen)
    finally:  # what was measured before an error is kept
        report(rows, passes, chosen.out)


def report(rows: list[Row], passes: list[Pass], out: str | None) -> None:
    """Print the tables, and write the figures."""
    if rows:
        names = f"{'billions':>9}{'tokens/s':>12}{'MFU':>8}{'GiB':>8}{'scan':>8}{'ratio':>8}"
        print(f"{'length':>8}  {'decoder':8}{names}")
        print("\n".join(map(str, rows)))
    print(f"\n{'length':>8}  {'one mixer, forward and backward':44}{'ms':>10}{'GiB':>8}")
    print("\n".join(map(str, passes)))
    if out:
        figures = {"decoders": [asdict(one) for one in rows], "layers": [asdict(one) for one in passes]}
        Path(out).write_text(json.dumps(figures, indent=1))


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of a sample")
    parser.add_argument("--attention", default="sdpa", help="kernel of attention: sdpa (cuDNN), flash")
    parser.add_argument("--scan", default="fla", help="kernel of scans and convolutions")
    parser.add_argument(
        "--recompute", help="memory.recompute.mode of both decoders; else full beyond 16,384 tokens a step, and none"
    )
    parser.add_argument("--steps", type=int, default=6, help="measured steps of a round")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], help="a setting of both decoders")
    parser.add_argument("--hybrid", action="append", default=[], help="a setting of the hybrid alone")
    parser.add_argument("--only-layers", action="store_true", help="leave out the decoders")
    parser.add_argument("--tiny", action="store_true", help="small models on a CPU")
    parser.add_argument("--out", help="file for the figures, in JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
