"""Time to plan one rank, by number of ranks. It starts no process and allocates no parameter.

    python benchmarks/planning.py
    python benchmarks/planning.py --preset 175b --layouts tp8pp16dp{} tp8pp16zero{} --degrees 1 8 64

For every layout and degree it measures, on the layout's last rank: `build` (the model on the meta device: split,
placed, slots filled), `boxes` (this rank's boxes, copies and partial groups of all parameters, after the optimizer's
state is sharded), and `groups` (the process groups that gradient reduction names; none is created). The peak memory is
that of the process, torch included.
"""

import argparse
import resource
import time
from dataclasses import replace
from typing import Any, cast

from mplug.config.defaults import default_settings
from mplug.config.sources import from_mapping
from mplug.layout.ranks import Grouping
from mplug.model.build import build_model
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug_steps.reduction import Reduction

LAYOUTS = ["tp8pp16dp{}", "tp8pp16zero{}", "tp8pp16fsdp{}", "tp8cp4pp16dp{}"]


class NamedGroups:
    """Counts the groupings for which a run would create process groups."""

    def __init__(self) -> None:
        self.named: set[Grouping] = set()

    def of(self, grouping: Grouping, use: str = "") -> None:
        """The process group of this rank: none is created."""
        self.named.add(grouping)


def settings(model: str, preset: str, layout: str) -> dict[str, Any]:
    """A run in which every data-parallel rank has one sample per step."""
    return {
        "model": {"name": model, "preset": preset},
        "parallel": {"layout": layout},
        "trainer": {"global_batch_size": 1 << 20, "micro_batch_size": 1, "device": "cpu"},
    }


def measured(model: str, preset: str, layout: str) -> list[str]:
    """A row of the table."""
    run = _prepared(model, preset, layout)
    seconds, began = [], time.perf_counter()
    built = build_model(run)
    seconds.append(time.perf_counter() - began)
    began = time.perf_counter()
    placements = dict(built.placements)
    if built.sharding is not None:
        placements |= {name: built.sharding.placed(placements[name]) for name in built.sharding.of}
    boxes = sum(len(placement.boxes(run.rank)) for placement in placements.values())
    seconds.append(time.perf_counter() - began)
    began, groups = time.perf_counter(), NamedGroups()
    run.groups = cast(Any, groups)
    Reduction(run, built.placements, (), [])
    seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [layout, f"{run.mesh.world_size:,}", *(f"{one:.2f}" for one in seconds), f"{boxes:,}", f"{peak:.0f}"]


def _prepared(model: str, preset: str, layout: str) -> Run:
    own = from_mapping(settings(model, preset, layout), "benchmark")
    config = resolve(Registry(), default_settings(), own)
    run = prepare(config)
    return replace(run, rank=run.mesh.world_size - 1)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt")
    parser.add_argument("--preset", default="462b")
    parser.add_argument("--layouts", nargs="*", default=LAYOUTS, help="{} stands for the degree")
    parser.add_argument("--degrees", nargs="*", type=int, default=[1, 2, 16, 128], help="degrees of data parallelism")
    options = parser.parse_args()
    build_model(_prepared(options.model, options.preset, options.layouts[0].format(1)))  # imports
    header = ["layout", "ranks", "build s", "boxes s", "groups s", "boxes", "peak MiB"]
    print(" | ".join(header), "\n", " | ".join("---" for _ in header), sep="")
    for layout in options.layouts:
        for degree in options.degrees:
            print(" | ".join(measured(options.model, options.preset, layout.format(degree))), flush=True)


if __name__ == "__main__":
    main()
