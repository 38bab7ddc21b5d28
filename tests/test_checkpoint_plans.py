"""Plans of saves and loads: which rank reads what of a manifest, what ranks send, and which chunks a box overlaps."""

import json
import random
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mplug.distributed.world import World
from mplug.errors import RunError
from mplug.precisions.dtypes import FORMATS
from mplug.run.prepare import prepare
from mplug_saving import index as index_module
from mplug_saving import opened
from mplug_saving.coverage import uncovered
from mplug_saving.index import Index, Overlap
from mplug_saving.manifest import contents_by_rank
from mplug_saving.opened import Opened
from mplug_saving.plans import KeptPlans, described
from mplug_saving.reading import CODES
from mplug_testing.harness import tiny_config

# Index.


def cut(draw: random.Random, length: int) -> list[tuple[int, int]]:
    """(start, length) of consecutive parts of a dimension."""
    bounds = sorted({0, length, *(draw.randrange(length + 1) for _ in range(draw.randrange(4)))})
    return [(low, high - low) for low, high in pairwise(bounds)]


def grid(draw: random.Random, shape: list[int]) -> list[tuple[list[int], list[int]]]:
    """Boxes that cover a tensor; a box of the first dimension is divided in its own way."""
    boxes = []
    for first in cut(draw, shape[0]) if shape else [None]:
        parts = [[first], *(cut(draw, length) for length in shape[1:])] if first else []
        boxes += [([s for s, _ in box], [n for _, n in box]) for box in product(*parts)]
    return boxes


def manifest_of(tensors: dict[str, list[tuple[list[int], list[int]]]], shapes: dict[str, list[int]]) -> Any:
    """A manifest whose chunks lie in files in turn."""
    names = [f"rank{number:05d}.safetensors" for number in range(5)]
    described = {
        name: {
            "shape": shapes[name],
            "dtype": "float32",
            "chunks": [(names[number % 5], start, size) for number, (start, size) in enumerate(boxes)],
        }
        for name, boxes in tensors.items()
    }
    return {"files": {name: {"bytes": 1 << 20, "crc32": 0} for name in names}, "tensors": described}


def region(start: Any, size: Any) -> tuple[slice, ...]:
    return tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))


def test_coverage_is_what_counting_every_element_says() -> None:
    draw, found = random.Random(19), set()
    for _ in range(400):
        shape = [draw.randrange(1, 5) for _ in range(draw.randrange(1, 4))]
        boxes = grid(draw, shape)
        if draw.random() < 0.5:  # the last dimension is divided first
            shape, boxes = shape[::-1], [(start[::-1], size[::-1]) for start, size in boxes]
        if draw.random() < 0.6:  # move one box
            _, size = boxes.pop()
            boxes.append(([draw.randrange(whole - n + 1) for whole, n in zip(shape, size, strict=True)], size))
        counted = torch.zeros(shape, dtype=torch.int64)
        for box in boxes:
            counted[region(*box)] += 1
        reason = uncovered(shape, boxes)
        assert (reason == "") == bool((counted == 1).all()), (shape, boxes)
        found.add(reason)
    assert found == {"", "its chunks overlap and leave gaps"}


def test_every_dtype_of_the_table_is_one_of_torch_and_of_safetensors(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(2, dtype=getattr(torch, name)) for name in FORMATS}
    save_file(tensors, tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    saved = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert {name: entry["dtype"] for name, entry in saved.items()} == {n: f.code for n, f in FORMATS.items()}
    assert {name: tensor.element_size() for name, tensor in tensors.items()} == {n: f.bytes for n, f in FORMATS.items()}
    assert len(CODES) == len(FORMATS)


def test_a_load_finds_the_chunk_and_the_place_of_every_element() -> None:
    """The reference marks each element with its chunk and its place there, and looks at every chunk."""
    draw = random.Random(7)
    for _ in range(300):
        shape = [draw.randrange(1, 7) for _ in range(draw.randrange(4))]
        saved, wanted = grid(draw, shape), grid(draw, shape)
        manifest = manifest_of({"x": saved}, {"x": shape})
        index = Index.of(manifest)
        whole = torch.arange(torch.tensor(shape).prod().item() if shape else 1).reshape(shape)
        boxes = [(tuple(start), tuple(size)) for start, size in wanted]
        found = {start: torch.full(size, -1) for start, size in boxes}
        files = {tuple(start): file for file, start, _ in manifest["tensors"]["x"]["chunks"]}
        stored = {tuple(start): whole[region(start, size)] for start, size in saved}
        for one in index.overlaps("x", boxes):
            assert one.file == files[one.chunk]
            found[one.wanted][region(one.placed, one.shape)] = stored[one.chunk][region(one.stored, one.shape)]
        for start, size in boxes:
            assert torch.equal(found[start], whole[region(start, size)]), (shape, saved, wanted)


def test_a_load_looks_only_at_chunks_near_a_box(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thousand chunks of rows, of which a box has three in common; the reference counts the chunks looked at."""
    rows = [([2 * number, 0], [2, 4]) for number in range(2000)]
    index, looked = Index.of(manifest_of({"x": rows}, {"x": [4000, 4]})), list[Any]()
    original = index_module._ends

    def ends(start: Any, shape: Any) -> Any:
        looked.append(start)
        return original(start, shape)

    monkeypatch.setattr(index_module, "_ends", ends)
    found = list(index.overlaps("x", [((1001, 0), (4, 4))]))
    assert [one.chunk for one in found] == [(1000, 0), (1002, 0), (1004, 0)]
    assert len(looked) <= 2 * 4
    assert found[0] == Overlap("rank00000.safetensors", (1000, 0), (1001, 0), (1, 0), (0, 0), (1, 4))


def test_the_shares_of_ranks_are_the_manifest_and_each_file_is_in_one() -> None:
    manifest = manifest_of({"x": [([0], [3]), ([3], [4])], "y": [([n], [1]) for n in range(7)]}, {"x": [7], "y": [7]})
    parts = contents_by_rank(manifest, 3)
    assert sorted(file for part in parts for file in part["files"]) == sorted(manifest["files"])
    assert max(len(part["files"]) for part in parts) == 2
    for name, saved in manifest["tensors"].items():
        chunks = [chunk for part in parts for chunk in part["tensors"].get(name, {"chunks": []})["chunks"]]
        assert sorted(chunks) == sorted(saved["chunks"])
    for part in parts:
        assert {chunk[0] for saved in part["tensors"].values() for chunk in saved["chunks"]} <= part["files"].keys()


# Saves.


def plan(start: int, length: int, dtype: str = "float32") -> bytes:
    return described([("x/weight", dtype, [4], [([start], [length])])])


def test_a_rank_sends_its_plan_once_and_again_when_it_changes() -> None:
    coordinator, other = KeptPlans(), KeptPlans()
    assert other.to_send(plan(2, 2)) == plan(2, 2)
    coordinator.receive([plan(0, 2), plan(2, 2)])
    other.keep(plan(2, 2))
    assert other.to_send(plan(2, 2)) is None
    before = coordinator.table()
    coordinator.receive([None, None])
    assert coordinator.table() is before
    assert other.to_send(plan(1, 3)) == plan(1, 3)
    with pytest.raises(ValueError, match="'x/weight' is not complete: its chunks overlap"):
        coordinator.receive([None, plan(1, 3)])
    coordinator.receive([plan(0, 1), plan(1, 3)])
    assert coordinator.table().needed == {"rank00000.safetensors": 4, "rank00001.safetensors": 12}


def test_a_plan_that_the_coordinator_has_refused_is_sent_again() -> None:
    """`keep` is called only after the coordinator has accepted all plans, so a failed save leaves nothing behind."""
    coordinator = KeptPlans()
    with pytest.raises(ValueError, match="do not cover its shape"):
        coordinator.receive([plan(0, 2)])
    assert coordinator.to_send(plan(0, 2)) == plan(0, 2)
    coordinator.receive([plan(0, 4)])
    assert coordinator.table().needed == {"rank00000.safetensors": 16}


def test_ranks_that_describe_a_tensor_differently_are_refused() -> None:
    with pytest.raises(ValueError, match="rank 1 has 'x/weight' as bfloat16"):
        KeptPlans().receive([plan(0, 2), plan(2, 2, "bfloat16")])


# Machines.


@pytest.mark.parametrize("local_rank", [0, 1])
def test_the_first_rank_of_a_machine_notices_another_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_rank: int
) -> None:
    run = prepare(tiny_config({"parallel.layout": "dp2"}))
    run.rank = 1
    monkeypatch.setattr(opened, "launched", lambda: World(1, 2, local_rank, "srun"))
    path = tmp_path / "step_00000001"
    path.mkdir()
    (path / "checkpoint.json").write_text("{}")
    one = Opened(path, None, None, opened.checksum_of_manifest(path), {"files": {}, "tensors": {}})  # type: ignore[arg-type]
    assert opened._difference(run, one) is None
    (path / "checkpoint.json").write_text("{ }")
    assert (opened._difference(run, one) is None) == (local_rank == 1), "the other ranks do not read the manifest"
    (path / "checkpoint.json").unlink()
    path.rmdir()
    if local_rank == 0:
        with pytest.raises(RunError, match=r"(?s)sees another checkpoint.*is the folder shared\?"):
            raise opened._difference(run, one) or AssertionError("nothing is noticed")
