"""Whether layouts on GPUs give the losses of one process on a CPU: to be run before GPU work is called done.

    python benchmarks/gpu_smoke.py [--steps 20] [--layouts tp2 pp2 dp2]

Trains the same small model by `mplug train` on the CPU in one process, and on GPUs under each layout, in fp32 and bf16.
Prints the largest relative difference of the losses and gradient norms from the CPU's fp32 run. Exit status 1 if one is
outside its band: 1e-4 in fp32, 2e-2 in bf16.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BANDS = {"fp32": 1e-4, "bf16": 2e-2}
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
    "schedule.name": "constant",
    "schedule.warmup_steps": 50,
}


def losses(folder: Path, device: str, precision: str, layout: str, steps: int) -> tuple[list[float], float]:
    """The losses and norms of a run, in turn, and its tokens a second at the end."""
    name = f"{device}-{precision}-{layout or 'one'}"
    command = [sys.executable, "-m", "mplug", "train", "--name", name, "--precision", precision, "--parallel", layout]
    fields = {**SETTINGS, "trainer.device": device, "trainer.steps": steps}
    command += [word for field, value in fields.items() for word in ("--set", f"{field}={value}")]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [value for line in lines for value in (line["loss"], line["grad_norm"])], lines[-1]["tokens_per_s"]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layouts", nargs="*", default=["tp2", "pp2", "dp2"])
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        reference, _ = losses(Path(folder), "cpu", "fp32", "", options.steps)
        print(f"{'layout':<10}{'precision':<11}{'largest difference':>20}{'band':>9}{'tokens/s':>12}{'seconds':>9}")
        for precision, band in BANDS.items():
            for layout in ["", *options.layouts]:
                began = time.monotonic()
                found, speed = losses(Path(folder), "cuda", precision, layout, options.steps)
                worst = max(abs(a - b) / abs(b) for a, b in zip(found, reference, strict=True))
                took, failed = time.monotonic() - began, failed or not worst <= band
                print(f"{layout or 'one':<10}{precision:<11}{worst:>20.2e}{band:>9.0e}{speed:>12,.0f}{took:>9.1f}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
