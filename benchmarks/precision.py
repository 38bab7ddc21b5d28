"""Whether a model of 50M parameters learns alike in every precision: losses of 100 steps on real text, side by side.

    python benchmarks/precision.py [--steps 100] [--only cpu fp32 bf16 compiled] [--text PATH]
    python benchmarks/precision.py --only cpu --save benchmarks/precision_cpu.json
    python benchmarks/precision.py --only fp32 bf16 compiled --reference benchmarks/precision_cpu.json

Trains the same byte-level GPT by `mplug train` in fp32 on the CPU, and on a GPU in fp32 (without TF32), in bf16, and in
bf16 with compiled units. Prints by how many nats a step's loss differs from the CPU's, at most and on average, over all
steps and over the last 20. Exit status 1 if one of the last 20 is outside its band.

The bands, in nats: 1e-3 in fp32, where only the order of sums differs, some 1e-7 of each, which the first steps of Adam
(whose size does not depend on the gradient's) amplify; 2e-2 in bf16, whose roundings are 2e-3 of a value: of losses of
about 3 nats that is 6e-3, and the weights' masters do not let it grow.

The text is by default the source in `tests/third_party/`, which is the same on every machine with the same checkout. So
the CPU's losses, which take minutes, can come from another machine: `--save` writes a file of losses, `--reference`
compares with it, and refuses one of other settings or other tokens.
"""

import argparse
import hashlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from mplug.cli.tables import table
from mplug.config.defaults import default_settings
from mplug.config.sources import read_assignments
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug.training.assembly import build_loader

SOURCES = Path(__file__).parent.parent / "tests" / "third_party"
SETTINGS = {
    "model.preset": "null",
    "model.num_layers": 8,
    "model.hidden_size": 704,
    "model.ffn_hidden_size": 3072,
    "model.num_attention_heads": 11,
    "model.vocab_size": 256,
    "trainer.seq_length": 256,
    "trainer.global_batch_size": 4,
    "trainer.seed": 1234,
    "trainer.max_grad_norm": 1.0,
    "trainer.eval_every": 0,
    "checkpoint.every": 0,
    "optimizer.lr": 3e-4,
    "optimizer.weight_decay": 0.1,
    "schedule.name": "constant",
    "schedule.warmup_steps": 20,
}
"""50.8M parameters, 1,024 tokens a step."""
RUNS: dict[str, dict[str, Any]] = {
    "cpu": {"trainer.device": "cpu", "trainer.precision": "fp32"},
    "fp32": {"trainer.device": "cuda", "trainer.precision": "fp32", "trainer.compile": "never"},
    "bf16": {"trainer.device": "cuda", "trainer.precision": "bf16", "trainer.compile": "never"},
    "compiled": {"trainer.device": "cuda", "trainer.precision": "bf16", "trainer.compile": "inductor"},
}
BANDS = {"cpu": 1e-3, "fp32": 1e-3, "bf16": 2e-2, "compiled": 2e-2}
LAST = 20
HEADER = ("RUN", "LARGEST", "MEAN", f"LAST {LAST}", "MEAN", "BAND", "", "LAST LOSS", "PARAMETERS", "TOKENS/S")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN", help=", ".join(RUNS))
    parser.add_argument("--text", type=Path, help="a file or a folder instead of the source in tests/third_party")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the losses of these runs")
    parser.add_argument("--reference", type=Path, metavar="FILE", help="compare with the CPU's losses in this file")
    options = parser.parse_args()
    if options.reference is None and "cpu" not in options.only:
        parser.error("a comparison needs a reference: add 'cpu' to --only, or set --reference")
    if options.only != ["cpu"] and not torch.cuda.is_available():
        parser.error("torch finds no GPU on this machine; use --only cpu")
    with tempfile.TemporaryDirectory(prefix="mplug-precision-") as folder:
        text = options.text.resolve() if options.text else copied_source(Path(folder) / "text")
        about = {"settings": {**SETTINGS, "trainer.steps": options.steps}}
        about["tokens_sha256"] = digest({**about["settings"], "data.path": text})
        saved = json.loads(options.reference.read_text()) if options.reference else {}
        for fact in about if saved else ():
            if saved.get(fact) != about[fact]:
                parser.error(
                    f"--reference {options.reference} has {fact}={saved.get(fact)}; this run has {about[fact]}"
                )
        losses, rows = {}, []
        for name in [name for name in RUNS if name in options.only]:  # the CPU first
            losses[name], *figures = trained(Path(folder), name, {**about["settings"], "data.path": text})
            reference = saved["losses"]["cpu"] if saved else losses["cpu"]
            rows.append((name, *compared(losses[name], reference, BANDS[name]), *figures))
            print(table(HEADER, rows), end="\n\n", flush=True)
    if options.save:
        options.save.write_text(json.dumps({**about, "torch": torch.__version__, "losses": losses}) + "\n")
    return int(any("OUTSIDE" in row for row in rows))


def compared(found: list[float], reference: list[float], band: float) -> tuple[str, ...]:
    """The columns that tell how far losses are from the reference's, in nats; empty for the reference itself."""
    if found is reference:
        return ("", "", "", "", "", "the reference")
    apart = [abs(one - other) for one, other in zip(found, reference, strict=True)]
    columns = [f"{value:.1e}" for part in (apart, apart[-LAST:]) for value in (max(part), sum(part) / len(part))]
    return (*columns, f"{band:.0e}", "within" if max(apart[-LAST:]) <= band else "OUTSIDE")


def trained(folder: Path, name: str, settings: dict[str, Any]) -> tuple[list[float], str, str, str]:
    """The loss of every step of a run, to 7 digits, and what the table tells of it; the run itself is not kept."""
    command = [sys.executable, "-m", "mplug", "train", "--name", name]
    command += [word for field, value in {**settings, **RUNS[name]}.items() for word in ("--set", f"{field}={value}")]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    directory = folder / "runs" / name
    steps = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    parameters = json.loads((directory / "record.json").read_text())["parameters"]
    shutil.rmtree(directory)
    losses = [float(f"{step['loss']:.7g}") for step in steps]
    tokens_per_s = statistics.median(step["tokens_per_s"] for step in steps)
    return losses, f"{losses[-1]:.4f}", f"{parameters:,}", f"{tokens_per_s:,.0f}"


def digest(settings: dict[str, Any]) -> str:
    """A checksum of all tokens that the steps of a run read, in their order."""
    fields = [f"{field}={value}" for field, value in settings.items()]
    run = prepare(resolve(Registry(), default_settings(), read_assignments(fields)))
    tokens = hashlib.sha256()
    for batch in build_loader(run, "train").take(settings["trainer.steps"] * settings["trainer.global_batch_size"]):
        tokens.update(batch["tokens"].numpy().tobytes())
    return tokens.hexdigest()


def copied_source(folder: Path) -> Path:
    """A copy of all modules of `tests/third_party/`: one text for all runs of a checkout."""
    for path in sorted(SOURCES.rglob("*.py")):
        target = folder / path.relative_to(SOURCES)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text())
    return folder


if __name__ == "__main__":
    sys.exit(main())
