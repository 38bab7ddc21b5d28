"""The step of one rank of a layout, with collectives that return at once: its computation, its copies and its memory.

    python benchmarks/one_rank.py zero2 fsdp2 --preset 7.1b --set model.num_layers=8 --set trainer.micro_batch_size=2

One GPU is rank 0 of each layout, in a process of its own. Collectives take no time and transfer nothing, except that a
gathering fills the parts of other ranks with this rank's part. So the table shows the time that a strategy takes beside
its communication. It does not show communication, nor the computation that communication slows down. Losses mean
nothing here.

`step` is the median in milliseconds, with the fastest and the slowest step. The following columns are the classes of
`mplug bench --profile`, in milliseconds; overlapped copies count only where nothing else runs. `copies` is the whole
time of the copies and fills, overlapped or not.
"""

import argparse
import statistics
import subprocess
import sys

from mplug.commands import (
    Registry,
    build,
    choose_device,
    launch_step,
    peak_memory_gib,
    prepare,
    read_assignments,
    resolve,
    table,
)
from mplug_estimates import timed

COLUMNS = ("GEMM", "attention", "norm and activation", "optimizer", "copies and fills", "other", "gaps")


def measure(layout: str, options: argparse.Namespace) -> list[str]:
    """The row of a layout, in this process."""
    import torch.distributed as dist
    from mplug_bench.measure import bench_settings
    from mplug_bench.profiling import profiled
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from mplug.distributed.groups import Groups

    given = [f"parallel.layout={layout}", f"trainer.precision={options.precision}"]
    given += [f"model.preset={options.preset}"] if options.preset else []
    overrides = read_assignments([*given, *options.assignments], "--set")
    run = prepare(resolve(Registry(), bench_settings(), overrides))
    run.device = choose_device(run.config)
    dist.init_process_group("fake", rank=0, world_size=run.mesh.world_size, store=FakeStore())
    run.rank, run.groups = 0, Groups(0)
    parts, config = build(run), run.config

    def step() -> None:
        run.step += 1
        optimizer = config.optimizer
        launch_step(run, parts, config.trainer.global_batch_size, optimizer.lr, optimizer.weight_decay)

    for _ in range(options.warmup):
        step()
    seconds = timed(step, options.steps, run.device)
    memory, profile = peak_memory_gib(run.device), profiled(step, run.device)
    copies = sum(kernel.seconds for kernel in profile.longest if kernel.kind == "copies and fills")
    figures = [statistics.median(seconds), min(seconds), max(seconds)]
    figures += [profile.classes.get(column, 0.0) for column in COLUMNS] + [copies]
    return [layout, *(f"{1e3 * figure:.1f}" for figure in figures), f"{memory:.1f}"]


def main() -> None:
    """Measure every layout in a process of its own, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="+", help="layouts whose rank 0 is measured")
    parser.add_argument("--preset", default="", help="a preset of the model")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--set", dest="assignments", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    options = parser.parse_args()
    if len(options.layouts) == 1:
        print(*measure(options.layouts[0], options), sep="|")
        return
    rows = []
    for layout in options.layouts:
        words = [sys.executable, __file__, layout, *(word for word in sys.argv[1:] if word not in options.layouts)]
        output = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(output.stdout.strip().splitlines()[-1].split("|"))
    print(table(["layout", "step", "fastest", "slowest", *COLUMNS, "copies", "GiB"], rows))


if __name__ == "__main__":
    main()
