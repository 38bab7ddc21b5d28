"""Compares DeepSpeed's engine inside of mplug with `zero`, with `fsdp`, and with DeepSpeed's own training loop.

    python benchmarks/deepspeed_loop.py --ranks 2 --preset 7.1b --micro-batch 2 --global-batch 16
    python benchmarks/deepspeed_loop.py --ranks 1 --preset 1.7b --stages 1 2               # on one GPU
    python benchmarks/deepspeed_loop.py --ranks 2 --preset nano --device cpu --steps 3     # a trial without a GPU

The own loop trains the GPT of `yardstick.py` as DeepSpeed's documents show it: `deepspeed.initialize`, `engine(...)`,
`engine.backward`, `engine.step`, with DeepSpeed's fused Adam and a mean loss. With `--adam torch` it takes torch's
fused AdamW, which needs no compiler. `mplug bench` measures the layouts of mplug, in turns, with the same shape and
batch.

Columns: tokens/s of a GPU (median step), and the peak memory of rank 0 in GiB. `--out` also writes them as JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

STAGES = (1, 2, 3)


def settings(options: argparse.Namespace) -> list[str]:
    """The options of `mplug bench` for the run that all variants share."""
    values = {
        "trainer.global_batch_size": options.global_batch,
        "trainer.micro_batch_size": options.micro_batch,
        "trainer.seq_length": options.seq_length,
        "trainer.device": options.device,
        "model.max_position_embeddings": options.seq_length,
    }
    words = ["--preset", options.preset, "--precision", "bf16" if options.device == "cuda" else "fp32"]
    return [*words, *(word for name, value in values.items() for word in ("--set", f"{name}={value}"))]


def of_mplug(options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """The layouts of mplug: (tokens/s of a GPU, GiB)."""
    n = options.ranks
    layouts = {f"mplug deepspeed{n}, stage {s}": f"deepspeed{n} parallel.deepspeed.stage={s}" for s in options.stages}
    if options.engine_alone:
        pass
    elif n == 1:
        layouts["mplug without DeepSpeed"] = ""
    else:
        layouts |= {f"mplug zero{n}, stage {s}": f"zero{n} parallel.zero.stage={s}" for s in (1, 2)}
        layouts[f"mplug fsdp{n}"] = f"fsdp{n}"
    variants = [word for layout in layouts.values() for word in ("--variant", f"parallel.layout={layout}")]
    with TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        counts = ["--steps", str(options.steps), "--warmup", str(options.warmup), "--out", str(out)]
        command = [sys.executable, "-P", "-m", "mplug", "bench", *settings(options), *counts, *variants]
        subprocess.run(command, check=True)
        figures = json.loads(out.read_text())["variants"]
    return {
        name: (figure["tokens_per_s_per_gpu"], figure["memory_gib"])
        for name, figure in zip(layouts, figures.values(), strict=True)
    }


def shape_of(options: argparse.Namespace) -> dict[str, Any]:
    """The section 'model' of the run, as the own loop needs it."""
    command = [sys.executable, "-P", "-m", "mplug", "config", "show", *settings(options)]
    import yaml

    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(yaml.safe_load(shown)["model"])


def own_loop(rank: int, options: argparse.Namespace, model: dict[str, Any], stage: int, out: Path) -> None:
    """Be one rank of DeepSpeed's own loop."""
    import deepspeed
    import torch
    from yardstick import GPT, Shape

    shape = Shape(**{field.name: model[field.name] for field in fields(Shape)})
    passes = options.global_batch // (options.micro_batch * options.ranks)
    on_gpu, steps = options.device == "cuda", options.warmup + options.steps
    torch.manual_seed(1)
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    with device:
        gpt = GPT(shape, options.seq_length, "sdpa")
    if on_gpu:  # DeepSpeed converts the parameters alone; heads rotated by tables in fp32 would be fp32
        for name, table in list(gpt.named_buffers()):
            setattr(gpt, name, table.bfloat16())
    if options.compile != "never":
        for unit in (gpt.embedding, *gpt.blocks, gpt.head):
            unit.compile(dynamic=False)
    adam = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_accumulation_steps": passes,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": on_gpu},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = None
    if options.adam == "torch":
        optimizer = torch.optim.AdamW(gpt.parameters(), fused=True, **adam)
    else:
        config["optimizer"] = {"type": "AdamW", "params": adam}
    engine, *_ = deepspeed.initialize(model=gpt, model_parameters=gpt.parameters(), optimizer=optimizer, config=config)
    size = (steps, passes, options.micro_batch, options.seq_length + 1)
    windows = torch.randint(shape.vocab_size, size, device=device)
    seconds = []
    for window in windows:
        if on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for batch in window:
            loss = engine(batch[:, :-1], batch[:, 1:]) / batch[:, 1:].numel()
            engine.backward(loss)
            engine.step()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    if rank == 0:
        memory = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else float("nan")
        tokens = options.global_batch * options.seq_length / options.ranks
        out.write_text(json.dumps([tokens / statistics.median(seconds[options.warmup :]), memory]))


def enter(rank: int, port: int, options: argparse.Namespace, model: dict[str, Any], stage: int, out: Path) -> None:
    """Be a spawned process: say who it is, as torchrun would."""
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": options.ranks, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": options.device}
    os.environ |= {name: str(value) for name, value in world.items()}
    if options.device == "cuda":
        import torch

        torch.cuda.set_device(rank)
    own_loop(rank, options, model, stage, out)


def of_deepspeed(options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """DeepSpeed's own loop in each stage: (tokens/s of a GPU, GiB)."""
    import torch.multiprocessing as mp

    model, found = shape_of(options), {}
    for stage in options.stages:
        with TemporaryDirectory() as folder:
            out = Path(folder) / "figures.json"
            mp.spawn(enter, (29600 + stage, options, model, stage, out), nprocs=options.ranks)
            found[f"DeepSpeed's own loop, stage {stage}"] = tuple(json.loads(out.read_text()))
    return found


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("micro-batch", 2), ("global-batch", 16), ("seq-length", 4096)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--preset", default="7.1b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--adam", choices=("deepspeed", "torch"), default="deepspeed")
    parser.add_argument("--compile", choices=("auto", "never"), default="auto", help="units of the own loop")
    parser.add_argument("--stages", type=int, nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--engine-alone", action="store_true", help="measure no other layout of mplug")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    figures = of_mplug(options) | of_deepspeed(options)
    print(f"\n{'':40}{'tokens/s/GPU':>14}{'GiB':>8}")
    for name, (rate, memory) in figures.items():
        print(f"{name:40}{rate:14,.0f}{memory:8.1f}")
    if options.out:
        options.out.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
