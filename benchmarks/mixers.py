"""A hybrid of gated delta nets and attention beside a dense decoder of the same size, and the mixer's layer alone.

    python benchmarks/mixers.py [--lengths 4096 32768] [--attention sdpa] [--recompute full] [--out mixers.json]
    python benchmarks/mixers.py --only decoders --decoders hybrid --lengths 65536 --layouts cp1 cp2
    python benchmarks/mixers.py --tiny    (small models on a CPU, for a test; its times mean nothing)

Both decoders have 1.7 billion parameters, 28 blocks of width 2048 and the vocabulary of Qwen3. In the hybrid, three of
four blocks have a gated delta net (8 key heads, 16 value heads of 128) instead of attention, and all MLPs are narrower
by 512, so that the sizes are equal. `mplug bench` measures them as `mplug train` executes them. A step has 16,384
tokens at length 4,096 and one sample beyond, with recomputation of whole blocks. Random tokens, bf16 with fp32 masters,
AdamW, clipping.

The first table has, for each length: tokens/s of a GPU, MFU (A = 6; a scan counts its recurrence only), the part of a
step in kernels of scans and convolutions, peak memory, and the ratio of tokens/s to the first row's of that length. The
second table has the forward and backward pass of one mixer, compiled, beside `fla.layers.GatedDeltaNet` of
flash-linear-attention of the same shape, if the package is installed; and of mplug's mixer in plain torch.

Every row is measured in a process of its own and printed as a line of JSON when it is done. A row that fails, or takes
longer than `--seconds`, has its reason instead of figures; the others are measured.
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

from mplug.training.hardware import peak_memory_gib
from mplug_estimates import timed
from mplug_nn import GatedDeltaNet, chunked_scan, short_convolution

PATTERN = "model.mixer_types=[gated_delta,gated_delta,gated_delta,attention]"
DENSE = "dense"
HYBRID = "hybrid"
ALONE = "cp1"


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
    """The figures of a decoder at a length in a layout, or the reason why there are none."""

    name: str
    length: int
    layout: str
    parameters: int = 0
    tokens_per_s: float = 0.0
    mfu: float | None = None
    memory_gib: float = 0.0
    scan: float | None = None
    reason: str = ""

    def line(self, ratio: float | None) -> str:
        """The row of the table."""
        begin = f"{self.length:>8}  {self.name:8}{self.layout:>8}"
        if self.reason:
            return f"{begin}  none: {self.reason}"
        shares = "".join(f"{'' if one is None else f'{100 * one:.1f}%':>8}" for one in (self.mfu, self.scan))
        figures = f"{self.parameters / 1e9:9.3f}{self.tokens_per_s:12,.0f}{shares}{self.memory_gib:8.1f}"
        return f"{begin}{figures}{'' if ratio is None else f'{ratio:.3f}':>8}"


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


def decoder(name: str, shape: Shape, length: int, layout: str, chosen: argparse.Namespace) -> Row:
    """A decoder at a length, by a call of `mplug bench`."""
    samples = max(1, shape.tokens // length)
    settings = [
        *shape.model,
        f"trainer.seq_length={length}",
        f"trainer.global_batch_size={samples}",
        f"trainer.micro_batch_size={samples}",
        f"memory.recompute.mode={chosen.recompute or ('full' if samples * length > LARGE.tokens else 'none')}",
    ]
    if not chosen.tiny:
        settings += ["trainer.precision=bf16", f"kernels.attention={chosen.attention}"]
        settings += [f"kernels.{kind}=triton" for kind in ("qk", "norm")]
    if name == HYBRID:
        settings += [PATTERN, *shape.hybrid, *chosen.hybrid]
        if not chosen.tiny:
            settings += [f"kernels.scan={chosen.scan}", f"kernels.convolution={chosen.scan}"]
        if chosen.scan == "fla" and not chosen.tiny and chosen.variants is not None:
            settings.append(f"kernels.fla.variants={chosen.variants}")
    if layout != ALONE:
        settings.append(f"parallel.layout={layout}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "bench.json")
        command = [sys.executable, "-m", "mplug", "bench", "--profile", "--out", str(out)]
        command += ["--steps", str(chosen.steps), "--warmup", str(chosen.warmup), "--rounds", str(chosen.rounds)]
        command += [word for setting in (*settings, *chosen.set) for word in ("--set", setting)]
        if reason := failure(command, chosen.seconds):
            return Row(name, length, layout, reason=reason)
        (figures,) = json.loads(out.read_text())["variants"].values()
    classes = figures["profile"]["classes"]
    part = classes["scan"] / sum(classes.values()) if "scan" in classes else None
    rate, memory = figures["tokens_per_s_per_gpu"], figures["memory_gib"]
    return Row(name, length, layout, figures["parameters"], rate, figures["mfu_a6"], memory, part)


def failure(command: list[str], seconds: int) -> str:
    """Run a command; why it failed, in its own words, or the empty string."""
    try:
        done = subprocess.run(command, check=False, timeout=seconds, stderr=subprocess.PIPE, text=True)
    except subprocess.TimeoutExpired:
        return f"not done after {seconds} s"
    if not done.returncode:
        return ""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-400:] or f"exit status {done.returncode}"


MIXERS: dict[str, Callable[[Shape], Callable[[torch.Tensor], torch.Tensor]]] = {
    "mplug, compiled, kernels/fla": lambda shape: own(shape, "fla"),
    "mplug, eager, kernels/fla": lambda shape: own(shape, "fla", compiled=False),
    "fla.layers.GatedDeltaNet": lambda shape: library(shape),
    "mplug, plain torch, compiled": lambda shape: own(shape, "plain"),
    "mplug, plain torch, eager": lambda shape: own(shape, "plain", compiled=False),
}


def mixers(length: int, tiny: bool) -> list[str]:
    """The names in `MIXERS` that are measured at a length: plain torch keeps more than a GPU holds at 32,768."""
    if tiny:
        return ["mplug, plain torch, eager"]
    return [name for name in MIXERS if "eager" not in name or "fla" in name if length <= 4096 or "plain" not in name]


def alone(name: str, length: int, chosen: argparse.Namespace) -> Pass:
    """A mixer in a process of its own, because an error of the GPU ends every later call of a process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "pass.json")
        command = [sys.executable, __file__, "--mixer", name, "--lengths", str(length), "--out", str(out)]
        command += ["--tiny"] if chosen.tiny else []
        command += ["--profile"] if chosen.profile else []
        command += [] if chosen.variants is None else ["--variants", str(chosen.variants)]
        if reason := failure(command, chosen.seconds):
            return Pass(name, length, None, None, f"none: {reason}")
        return Pass(**json.loads(out.read_text()))


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
    """flash-linear-attention's layer of the same shape.

    It refuses Triton 3.4 to 3.7.0 on Hopper, because a backward kernel's results are wrong there. It runs here all the
    same: only its time is used.
    """
    importlib.import_module("fla.ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True
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


def measured(name: str, length: int, chosen: argparse.Namespace) -> Pass:
    """The median pass of 8 after 3, in this process."""
    shape = SMALL if chosen.tiny else LARGE
    device, dtype = ("cpu", torch.float32) if chosen.tiny else ("cuda", torch.bfloat16)
    if "fla" in name:  # the library's own layer calls the same kernels, and variants that are broken would end it
        if reason := importlib.import_module("mplug_fla.limits").missing():
            raise SystemExit(reason)
        if chosen.variants is not None:
            importlib.import_module("mplug_fla.variants").keep(chosen.variants)
    module: Any = MIXERS[name](shape)
    module.to(device, dtype)
    samples = max(1, shape.tokens // length)
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
    if chosen.profile:
        with torch.profiler.profile() as profile:
            step()
        print(
            profile.key_averages().table(
                sort_by="self_device_time_total" if device == "cuda" else "self_cpu_time_total",
                row_limit=30,
                max_name_column_width=90,
            )
        )
    return Pass(name, length, seconds[len(seconds) // 2], peak_memory_gib(device))


def main() -> None:
    """Measure and print both tables."""
    chosen = options()
    lengths = chosen.lengths or ([64, 128] if chosen.tiny else [4096, 32768])
    if chosen.mixer:
        Path(chosen.out).write_text(json.dumps(asdict(measured(chosen.mixer, lengths[0], chosen))))
        return
    shape = SMALL if chosen.tiny else LARGE
    rows: list[Row] = []
    passes: list[Pass] = []
    for length in lengths:
        for name, layout in ((name, layout) for name in chosen.decoders for layout in chosen.layouts):
            if chosen.only != "mixers":
                rows.append(decoder(name, shape, length, layout, chosen))
                print(json.dumps(asdict(rows[-1])), flush=True)
        for name in mixers(length, chosen.tiny):
            if chosen.only != "decoders":
                passes.append(alone(name, length, chosen))
                print(json.dumps(asdict(passes[-1])), flush=True)
    report(rows, passes, chosen.out)


def ratios(rows: list[Row]) -> list[float | None]:
    """Tokens/s of each row as a share of those of the first row of its length; None if one of the two failed."""
    firsts: dict[int, float] = {}
    for row in rows:
        firsts.setdefault(row.length, row.tokens_per_s)
    return [row.tokens_per_s / firsts[row.length] if row.tokens_per_s and firsts[row.length] else None for row in rows]


def report(rows: list[Row], passes: list[Pass], out: str | None) -> None:
    """Print the tables, and write the figures."""
    found = ratios(rows)
    if rows:
        names = f"{'billions':>9}{'tokens/s':>12}{'MFU':>8}{'scan':>8}{'GiB':>8}{'ratio':>8}"
        print(f"{'length':>8}  {'decoder':8}{'layout':>8}{names}")
        print("\n".join(row.line(ratio) for row, ratio in zip(rows, found, strict=True)))
    if passes:
        print(f"\n{'length':>8}  {'one mixer, forward and backward':44}{'ms':>10}{'GiB':>8}")
        print("\n".join(map(str, passes)))
    if out:
        decoders = [asdict(row) | {"ratio": ratio} for row, ratio in zip(rows, found, strict=True)]
        Path(out).write_text(json.dumps({"decoders": decoders, "mixers": [asdict(one) for one in passes]}, indent=1))


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of a sample")
    parser.add_argument("--decoders", nargs="+", default=[DENSE, HYBRID], choices=[DENSE, HYBRID])
    parser.add_argument("--layouts", nargs="+", default=[ALONE], help=f"layouts of the decoders; {ALONE}: one process")
    parser.add_argument("--only", choices=["decoders", "mixers"], help="measure one table")
    parser.add_argument("--attention", default="sdpa", help="kernel of attention: sdpa (cuDNN), flash")
    parser.add_argument("--scan", default="fla", help="kernel of scans and convolutions")
    parser.add_argument("--variants", type=int, help="kernels.fla.variants: how many variants of a kernel are tried")
    parser.add_argument(
        "--recompute", help="memory.recompute.mode of both decoders; else full beyond 16,384 tokens a step, and none"
    )
    parser.add_argument("--steps", type=int, default=6, help="measured steps of a round")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=900, help="the most seconds of a row")
    parser.add_argument("--set", action="append", default=[], help="a setting of both decoders")
    parser.add_argument("--hybrid", action="append", default=[], help="a setting of the hybrid alone")
    parser.add_argument("--tiny", action="store_true", help="small models on a CPU")
    parser.add_argument("--out", help="file for the figures, in JSON")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a pass of each mixer")
    parser.add_argument("--mixer", choices=list(MIXERS), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
