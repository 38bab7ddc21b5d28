"""Whether layouts on GPUs give the losses of one process on a CPU: to be run before GPU work is called done.

    python benchmarks/gpu_smoke.py [--steps 20] [--layouts tp2 pp2 dp2] [--precisions fp32 bf16] [--compile inductor]
                                   [--set kernels.mlp=quack ...]

Trains the same small model by `mplug train` on the CPU in one process, and on GPUs under each layout, in fp32 and bf16.
Prints the largest relative difference of the losses and of the gradient norms from the CPU's fp32 run. Exit status 1 if
a loss is outside its band: 1e-4 in fp32, 1e-2 in bf16.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

BANDS = {"fp32": 1e-4, "bf16": 1e-2}
SETTINGS = {
    "model.num_layers": 4,
    "model.hidden_size": 256,
    "model.num_attention_heads": 8,
    "model.num_kv_heads": 4,
    "model.tie_embeddings": True,
    "trainer.seq_length": 256,
    "trainer.micro_batch_size": 4,
    "trainer.global_batch_size": 16,
    "trainer.eval_every": 0,
    "trainer.log_every": 10,
    "optimizer.lr": 1e-3,
    "schedule.name": "constant",
    "schedule.warmup_steps": 50,
}


def metrics(
    folder: Path, device: str, precision: str, layout: str, steps: int, more: Sequence[str]
) -> list[dict[str, float]]:
    """A run's line of metrics for each step; `more` are FIELD=VALUE."""
    name = f"{device}-{precision}-{layout or 'one'}"
    command = [sys.executable, "-m", "mplug", "train", "--name", name, "--precision", precision, "--parallel", layout]
    fields = {**SETTINGS, "trainer.device": device, "trainer.steps": steps}
    assignments = [*(f"{field}={value}" for field, value in fields.items()), *more]
    command += [word for assignment in assignments for word in ("--set", assignment)]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def worst(found: list[dict[str, float]], reference: list[dict[str, float]], figure: str) -> float:
    """The largest relative difference over all steps."""
    return max(abs(a[figure] - b[figure]) / abs(b[figure]) for a, b in zip(found, reference, strict=True))


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layouts", nargs="*", default=["tp2", "pp2", "dp2"])
    parser.add_argument("--precisions", nargs="+", choices=BANDS, default=list(BANDS))
    parser.add_argument("--compile", default="never", help="trainer.compile of the runs on GPUs")
    parser.add_argument("--set", action="append", default=[], dest="more", help="FIELD=VALUE of the runs on GPUs")
    options = parser.parse_args()
    failed, on_gpus = False, [f"trainer.compile={options.compile}", *options.more]
    with tempfile.TemporaryDirectory() as folder:
        reference = metrics(Path(folder), "cpu", "fp32", "", options.steps, ["trainer.compile=never"])
        print(
            f"{'layout':<8}{'precision':<11}{'loss differs':>13}{'band':>7}{'norm differs':>14}{'tokens/s':>12}{'s':>7}"
        )
        for precision in options.precisions:
            band = BANDS[precision]
            for layout in ["", *options.layouts]:
                began = time.monotonic()
                found = metrics(Path(folder), "cuda", precision, layout, options.steps, on_gpus)
                loss, norm = worst(found, reference, "loss"), worst(found, reference, "grad_norm")
                failed = failed or not loss <= band
                differs, speed, took = (
                    f"{loss:>13.1e}{band:>7.0e}{norm:>14.1e}",
                    found[-1]["tokens_per_s"],
                    time.monotonic(),
                )
                print(f"{layout or 'one':<8}{precision:<11}{differs}{speed:>12,.0f}{took - began:>7.1f}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
