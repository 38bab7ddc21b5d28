"""Every attention that this machine has: how exact it is, what a training by it loses, how fast it is.

    python benchmarks/attention.py [--only sdpa flash-attn-4] [--steps 20] [--without errors losses speed]

Errors are ‖found - exact‖ / ‖exact‖ of the output and of dq, dk, dv in bf16 against the plain composition in fp64, the
largest over several shapes, eager and compiled; `plain` is that composition in bf16. Losses are those of a small GPT in
bf16, as the largest relative difference from cuDNN's run, or from the first attention's where there is no cuDNN. Speed
is the median forward and backward pass at b4 s4096 h16 d128 (on a CPU: b1 s256 h4 d64), causal, its FLOPs counted once:
4 B H S² K / 2 forward and 2.5 times that backward. Exit status 1 if a loss is off by more than 1e-2, or an error is
above 1e-2 or twice the plain composition's.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch

from mplug.errors import UsageError
from mplug.model.build import build_model, unmet_reasons
from mplug.training.hardware import Moment
from mplug_nn import AttentionInputs, AttentionSpec
from mplug_testing.attention_errors import Heads, attention_errors
from mplug_testing.harness import tiny_run

ATTENTIONS: dict[str, dict[str, object]] = {
    "sdpa cudnn": {"kernels.attention": "sdpa", "kernels.sdpa.backend": "cudnn"},
    "sdpa auto": {"kernels.attention": "sdpa"},
    "sdpa flash": {"kernels.attention": "sdpa", "kernels.sdpa.backend": "flash"},
    "sdpa efficient": {"kernels.attention": "sdpa", "kernels.sdpa.backend": "efficient"},
    "sdpa math": {"kernels.attention": "sdpa", "kernels.sdpa.backend": "math"},
    "triton": {"kernels.attention": "triton"},
    "flex": {"kernels.attention": "flex"},
    "flash-attn-4": {"kernels.attention": "flash", "kernels.flash.version": 4},
    "flash-attn-3": {"kernels.attention": "flash", "kernels.flash.version": 3},
    "flash-attn-2": {"kernels.attention": "flash", "kernels.flash.version": 2},
}
BAND = 1e-2
SHAPES = {
    "cuda": [Heads(2, 512, 8, 8, 64), Heads(2, 1000, 8, 2, 128), Heads(1, 131, 4, 1, 128), Heads(1, 2048, 4, 4, 128)],
    "cpu": [Heads(2, 128, 4, 4, 64), Heads(1, 131, 4, 1, 64)],
}
TIMED = {"cuda": Heads(4, 4096, 16, 16, 128), "cpu": Heads(1, 256, 4, 4, 64)}
RUN = {
    "model.preset": "null",
    "model.num_layers": 4,
    "model.hidden_size": 256,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 2,
    "model.vocab_size": 259,
    "trainer.seq_length": 256,
    "trainer.global_batch_size": 8,
    "trainer.precision": "bf16",
    "trainer.eval_every": 0,
    "optimizer.lr": 1e-3,
    "schedule.name": "constant",
    "schedule.warmup_steps": 50,
}
Core = Callable[..., torch.Tensor]


def supplier(settings: dict[str, object], heads: Heads, device: str) -> Core | str:
    """What fills the slot in a run of such heads, or why nothing does."""
    shape = {"num_attention_heads": heads.h, "num_kv_heads": heads.g, "hidden_size": heads.h * heads.k}
    model = {f"model.{name}": value for name, value in shape.items()}
    try:
        run = tiny_run({"trainer.device": device, "trainer.precision": "bf16", **model, **settings})
    except UsageError as error:
        return str(error)
    unmet = unmet_reasons(run)
    if unmet:
        return unmet[0].partition("': ")[2]
    module = next(slot.site.module for slot in build_model(run).slots if slot.site.slot == "Attention.core")
    core: Core = module.core
    return core


def errors(settings: dict[str, object], device: str) -> tuple[float, float, bool]:
    """The largest error over shapes, eager and compiled, the plain composition's, and whether all are in the band."""
    worst, usual, sound = 0.0, 0.0, True
    for heads in SHAPES[device]:
        core = supplier(settings, heads, device)
        if isinstance(core, str):
            continue
        torch.compiler.reset()
        for call in (core, torch.compile(core, fullgraph=True, dynamic=False)):
            for error, plain in attention_errors(call, heads, device).values():
                worst, usual = max(worst, error), max(usual, plain)
                sound = sound and error <= min(BAND, 2 * plain)
    return worst, usual, sound


def losses(folder: Path, name: str, settings: dict[str, object], device: str, steps: int) -> list[float]:
    """The loss of every step of a training."""
    run = name.replace(" ", "-")
    fields = {**RUN, **settings, "trainer.device": device, "trainer.steps": steps}
    command = [sys.executable, "-m", "mplug", "train", "--name", run]
    command += [word for field, value in fields.items() for word in ("--set", f"{field}={value}")]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def seconds(core: Core, heads: Heads, device: str, calls: int) -> float:
    """The median forward and backward pass."""
    packed, gradient = heads.drawn(device, torch.bfloat16)
    leaves = [x.contiguous().requires_grad_() for x in packed.split((heads.h, heads.g, heads.g), dim=2)]
    spec = AttentionSpec(heads.k**-0.5, heads.k, heads.k)

    def once() -> None:
        torch.autograd.grad(core(*leaves, spec, AttentionInputs()), leaves, gradient)

    for _ in range(3):
        once()
    moments = [Moment(device)]
    for _ in range(calls):
        once()
        moments.append(Moment(device))
    moments[-1].wait()
    return statistics.median(after.since(before) for before, after in pairwise(moments))


def tflops(heads: Heads, elapsed: float) -> float:
    """TFLOP/s of a causal forward and backward pass."""
    return 4 * heads.b * heads.h * heads.s**2 * heads.k * 3.5 / 2 / elapsed / 1e12


def main() -> int:
    """Print a row for every attention."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=list(ATTENTIONS), help="names of attentions, or their beginnings")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--without", nargs="*", choices=["errors", "losses", "speed"], default=[])
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # those of torch's compiler
    device = "cuda" if torch.cuda.is_available() else "cpu"
    timed, failed, reference = TIMED[device], False, list[float]()
    print(f"{'attention':<16}{'error':>9}{'plain':>9}{'loss differs':>14}{'ms':>9}{'TFLOP/s':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in ATTENTIONS.items():
            if not name.startswith(tuple(options.only)):
                continue
            core = supplier(settings, timed, device)
            if isinstance(core, str):
                print(f"{name:<16}{core}")
                continue
            cells = ["-"] * 5
            if "errors" not in options.without:
                worst, usual, sound = errors(settings, device)
                cells[:2], failed = [f"{worst:.1e}", f"{usual:.1e}"], failed or not sound
            if "losses" not in options.without:
                found = losses(Path(folder), name, settings, device, options.steps)
                reference = reference or found
                off = max(abs(a - b) / abs(b) for a, b in zip(found, reference, strict=True))
                cells[2], failed = f"{off:.1e}", failed or not off <= BAND
            if "speed" not in options.without:
                elapsed = seconds(core, timed, device, options.calls)
                cells[3:] = [f"{elapsed * 1e3:.3f}", f"{tflops(timed, elapsed):.4g}"]
            print(f"{name:<16}{cells[0]:>9}{cells[1]:>9}{cells[2]:>14}{cells[3]:>9}{cells[4]:>9}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
