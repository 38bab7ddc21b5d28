"""The losses of a hybrid of gated delta nets and attention, and of a dense decoder of the same size, on real text.

    python benchmarks/mixer_curves.py [--seeds 1 2 3] [--steps 500] [--at-once 1] [--out FILE]
    python benchmarks/mixer_curves.py --device cuda --at-once 2      (each run takes one of the machine's GPUs in turn)

Both decoders have 0.9 million parameters, 4 blocks of width 128 and the 257 tokens of bytes. In the hybrid, the first
three blocks have a gated delta net instead of attention, and all MLPs are narrower by 37, so that the sizes are equal
to 0.02%. A step has 4 samples of 256 tokens of the text of Python's standard library. `mplug train` in fp32, AdamW with
a peak learning rate of 0.003 for both, which was not tuned for either. A seed gives the initial weights and the order
of the data.

The file has, for each decoder and seed, the training loss in nats per token as the mean of each `EVERY` steps, the
validation losses, and the number of parameters. `python docs/pictures.py` draws it for docs/mixers.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

OUT = Path(__file__).with_suffix(".json")
EVERY = 10
SHARED = {
    "model.name": "llama",
    "model.vocab_size": 257,
    "model.hidden_size": 128,
    "model.num_layers": 4,
    "model.num_attention_heads": 4,
    "model.num_kv_heads": 4,
    "trainer.seq_length": 256,
    "trainer.micro_batch_size": 4,
    "trainer.global_batch_size": 4,
    "trainer.eval_every": 100,
    "trainer.eval_samples": 64,
    "trainer.log_every": 100,
    "optimizer.lr": 3e-3,
}
DECODERS: dict[str, dict[str, Any]] = {
    "dense": {"model.ffn_hidden_size": 352},
    "hybrid": {
        "model.ffn_hidden_size": 315,
        "model.mixer_types": "[gated_delta,gated_delta,gated_delta,attention]",
    },
}


def train(name: str, seed: int, place: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """One run -> its curves; `place` chooses its GPU."""
    fields = {**SHARED, **DECODERS[name], "trainer.seed": seed, "trainer.steps": chosen.steps}
    fields["trainer.device"] = chosen.device
    command = [sys.executable, "-m", "mplug", "train", "--name", "run"]
    command += [word for field, value in fields.items() for word in ("--set", f"{field}={value}")]
    environment = dict(os.environ)
    if chosen.device == "cuda":
        import torch

        environment["CUDA_VISIBLE_DEVICES"] = str(place % torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        run = Path(folder, "runs", "run")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    means = [sum(losses[first : first + EVERY]) / EVERY for first in range(0, len(losses), EVERY)]
    validation = {line["step"]: round(line["val_loss"], 4) for line in lines if "val_loss" in line}
    print(json.dumps({"decoder": name, "seed": seed, "validation": validation}), flush=True)
    return {"decoder": name, "seed": seed, "loss": [round(mean, 4) for mean in means], "validation": validation}


def main() -> None:
    """Train all runs and write the file; runs that are already in it are kept."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--at-once", type=int, default=1, help="runs that are trained at the same time")
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args()
    known = json.loads(chosen.out.read_text())["runs"] if chosen.out.exists() else []
    wanted = [(name, seed) for seed in chosen.seeds for name in DECODERS]
    missing = [one for one in wanted if one not in {(run["decoder"], run["seed"]) for run in known}]
    runs = list(known)

    def trained(place: int) -> None:
        runs.append(train(*missing[place], place, chosen))
        ordered = sorted(runs, key=lambda run: (run["decoder"], run["seed"]))
        chosen.out.write_text(json.dumps({"every": EVERY, "steps": chosen.steps, "runs": ordered}, indent=1) + "\n")

    with ThreadPoolExecutor(chosen.at_once) as pool:
        list(pool.map(trained, range(len(missing))))


if __name__ == "__main__":
    main()
