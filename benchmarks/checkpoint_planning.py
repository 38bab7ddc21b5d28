"""What the planning of a save and of a load costs a rank of a large run, without starting the run.

    python benchmarks/checkpoint_planning.py [--preset 175b] [--layout tp8pp16zero8]

Each rank's state is built from the placements, on the meta device: weights and the two moments of AdamW. The script
then calls what the ranks call, one rank at a time, and measures

    seconds     the CPU time of the planning alone: no tensor is copied, and nothing is sent or read from a disk
    received    the bytes that a rank receives from other ranks, and those of the manifest that it reads from the disk
    sent        the bytes that a rank sends to the coordinator (rank 0), or the coordinator to all others

for the coordinator and for an ordinary rank, in three cases: the first save, a later save with the same layout, and a
load under the same layout. The time of the placements is printed apart. What a broadcast sends is counted once.
"""

import argparse
import json
import pickle
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from mplug.cli.tables import human_bytes, table
from mplug.config.defaults import default_settings
from mplug.config.sources import read_assignments
from mplug.model.build import build_model
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug_saving.boxes import Boxed, BoxLoadPlanner, BoxSavePlanner, State, held_boxes, owned_boxes
from mplug_saving.index import Index
from mplug_saving.manifest import contents_by_rank, decode, encode, expected_in
from mplug_saving.names import file_of
from mplug_saving.plans import KeptPlans
from mplug_saving.storage import Written

T = TypeVar("T")
STATES = ("weight", "exp_avg", "exp_avg_sq")
FACTS = {
    **dict.fromkeys(("step", "world_size", "samples", "tokens"), 1),
    **dict.fromkeys(("saved", "layout"), ""),
    **{key: {} for key in ("loader", "states")},
    "provenance": {"mplug": "", "torch": "", "plugins": []},
}
Row = tuple[str, str, str, str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="175b")
    parser.add_argument("--layout", default="tp8pp16zero8")
    options = parser.parse_args()
    run = prepared(options.preset, options.layout)
    size, began = run.mesh.world_size, time.process_time()
    ordinary = size // 2 + 1
    owned, held = states_of(run, (0, ordinary))
    parts = sum(len(boxed.parts) for state in owned for boxed in state.values())
    print(f"{options.preset} {options.layout}: {size} ranks, {parts:,} chunks")
    print(f"placements of all ranks: {time.process_time() - began:.1f} s\n")
    plans = [KeptPlans() for _ in range(size)]
    rows = saved("first save", owned, plans, ordinary) + saved("later save", owned, plans, ordinary)
    rows += loaded(plans[0], held[0], held[1], size, ordinary)
    print(table(("CASE", "RANK", "SECONDS", "RECEIVED", "SENT"), rows))


def prepared(preset: str, layout: str) -> Run:
    words = ["model.name=gpt", f"model.preset={preset}", "data.name=mock", f"parallel.layout={layout}"]
    settings = read_assignments([*words, "trainer.global_batch_size=4096"])
    return prepare(resolve(Registry(), default_settings(), settings))


def states_of(run: Run, readers: tuple[int, int]) -> tuple[list[State], list[State]]:
    """What every rank writes, and what two ranks read."""
    owned, held, of_stage = [], [], dict[int, Any]()
    for rank in range(run.mesh.world_size):
        run.rank, stage = rank, run.mesh.index(rank, "pp")
        if stage not in of_stage:
            of_stage = {stage: list(placements(run))}
        owned.append(state_of(of_stage[stage], rank, owned_boxes))
        if rank in readers:
            held.append(state_of(of_stage[stage], rank, held_boxes))
    return owned, held


def placements(run: Run) -> Iterator[tuple[str, Any]]:
    """The placement of every parameter of this rank's stage, as its optimizer's states have it."""
    model = build_model(run)
    for name in model.parameters():
        whole = model.placements[name]
        yield name, model.sharding.placed(whole) if model.sharding and name in model.sharding.of else whole


def state_of(placed: list[tuple[str, Any]], rank: int, boxes_of: Callable[[Any, torch.Tensor, int], Boxed]) -> State:
    state: State = {}
    for name, placement in placed:
        boxed = boxes_of(placement, torch.empty(placement.local_shape(rank), device="meta"), rank)
        state |= {f"{name}/{one}": boxed for one in STATES if boxed.parts}
        step = boxes_of(placement, torch.empty((), device="meta"), rank)
        state |= {f"{name}/step": step} if step.parts else {}
    return state


def saved(case: str, states: list[State], plans: list[KeptPlans], ordinary: int) -> list[Row]:
    """A save: every rank plans, the coordinator merges the plans and writes the manifest."""
    sent, seconds, planners = [], [], []
    for state, kept in zip(states, plans, strict=True):
        began, planner = time.process_time(), BoxSavePlanner(kept)
        planner.set_up_planner(state)
        sent.append(planner.create_local_plan())
        seconds.append(time.process_time() - began)
        planners.append(planner)
    merged, (answers, metadata) = timed(lambda: planners[0].create_global_plan(sent))
    for planner, answer in zip(planners, answers, strict=True):
        planner.finish_plan(answer)
    composed, _ = timed(lambda: text_of(plans[0]))
    received = size_of(answers[ordinary]) + size_of(metadata)
    result = size_of([WriteResult(MetadataIndex(file_of(ordinary)), 1 << 40, Written(file_of(ordinary), 1 << 40, 1))])
    gathered = sum(map(size_of, sent)) + len(states) * result
    scattered = sum(map(size_of, answers)) + size_of(metadata)
    return [
        row(case, "coordinator", seconds[0] + merged + composed, gathered, scattered),
        row(case, "another", seconds[ordinary], received, size_of(sent[ordinary]) + result),
    ]


def text_of(plans: KeptPlans) -> str:
    kept = plans.table()
    files = {name: {"bytes": needed, "crc32": 0} for name, needed in kept.needed.items()}
    return encode({**FACTS, "files": files}, kept)


def loaded(plans: KeptPlans, first: State, other: State, size: int, ordinary: int) -> list[Row]:
    """A load: the coordinator reads the manifest, every rank plans its reads and checks the headers of its files."""
    text = text_of(plans).encode()
    decoded, manifest = timed(lambda: decode(text))
    packed, index = timed(lambda: Index.of(manifest))
    divided, shares = timed(
        lambda: [zlib.compress(json.dumps(part).encode(), 1) for part in contents_by_rank(manifest, size)]
    )
    sent = pickle.dumps((FACTS, index, 0))
    received, _ = timed(lambda: (pickle.loads(sent), expected_in(json.loads(zlib.decompress(shares[ordinary])))))
    own, _ = timed(lambda: planned(index, first))
    another, _ = timed(lambda: planned(index, other))
    total = decoded + packed + divided + own
    return [
        row("load", "coordinator", total, len(text), len(sent) + sum(map(len, shares))),
        row("load", "another", received + another, len(sent) + len(shares[ordinary]), 0),
    ]


def planned(index: Index, state: State) -> object:
    planner = BoxLoadPlanner(index)
    planner.set_up_planner(state)
    return planner.create_local_plan()


def timed(call: Callable[[], T]) -> tuple[float, T]:
    began = time.process_time()
    found = call()
    return time.process_time() - began, found


def size_of(value: object) -> int:
    return len(pickle.dumps(value))


def row(case: str, rank: str, seconds: float, received: int, sent: int) -> Row:
    return (case, rank, f"{seconds:.3f}", human_bytes(received), human_bytes(sent))


if __name__ == "__main__":
    main()
