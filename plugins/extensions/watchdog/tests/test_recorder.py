"""Which rank has not entered which collective, from crafted dumps and from the recorders of real processes."""

import json
import os
import pickle
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mplug_watchdog.heartbeats import Beat
from mplug_watchdog.listener import Listener
from mplug_watchdog.recorder import Entered, analysis, entered, last_entered, of_beat, of_files, record

from mplug_testing.workers import run_workers

CONFIG = {
    "1": {"name": "1", "desc": "mplug group 0", "ranks": "[0, 1]"},
    "2": {"name": "2", "desc": "mplug group 1", "ranks": "[0, 1, 2, 3]"},
}


def entry(
    group: str, number: int, name: str = "nccl:all_reduce", state: str = "started", **more: Any
) -> dict[str, Any]:
    return {
        "process_group": (group, CONFIG[group]["desc"]),
        "collective_seq_id": number,
        "profiling_name": name,
        "state": state,
        "input_sizes": [[8]],
        "is_p2p": False,
        **more,
    }


def dump(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"version": "2.10", "pg_config": CONFIG, "pg_status": {}, "entries": list(entries)}


def of(dumps: dict[int, dict[str, Any]], silent: tuple[int, ...] = ()) -> str:
    return analysis({rank: entered(one) for rank, one in dumps.items()}, silent)


def test_the_rank_that_has_not_entered_a_collective_is_named() -> None:
    done = entry("2", 6, state="completed")
    dumps = {rank: dump(done, entry("2", 7)) for rank in (0, 1, 3)} | {2: dump(done)}
    assert of(dumps) == (
        "rank 2 has not entered all_reduce number 7 of group 'mplug group 1', in which ranks 0, 1 and 3 wait"
    )
    del dumps[2]  # a stopped process sends nothing
    assert of(dumps, silent=(2,)).startswith("rank 2 has not entered all_reduce number 7")
    assert of(dumps) == ""


def test_a_rank_that_waits_in_another_group_is_a_victim() -> None:
    dumps = {
        0: dump(entry("1", 3)),  # waits for rank 1
        1: dump(entry("1", 2, state="completed")),
        2: dump(entry("2", 9)),  # waits for ranks 0 and 1
        3: dump(entry("2", 9)),
    }
    dumps[0]["entries"].insert(0, entry("2", 8, state="completed"))
    dumps[1]["entries"].insert(0, entry("2", 8, state="completed"))
    assert of(dumps) == "rank 1 has not entered all_reduce number 3 of group 'mplug group 0', in which rank 0 waits"


def test_different_operations_and_sizes_show_different_programs() -> None:
    gather, other = entry("1", 4, "nccl:all_gather"), entry("1", 4, input_sizes=[[9]])
    assert of({0: dump(entry("1", 4)), 1: dump(gather)}) == (
        "collective 4 of group 'mplug group 0' is entered by rank 0 as all_reduce [[8]] and rank 1 as all_gather: the "
        "ranks run different programs"
    )
    assert "rank 1 as all_reduce [[9]]" in of({0: dump(entry("1", 4)), 1: dump(other)})
    uneven = [entry("1", 4, "nccl:all_to_all", input_sizes=[[size]], state="completed") for size in (3, 5)]
    assert of({0: dump(uneven[0]), 1: dump(uneven[1])}) == ""


def test_a_collective_that_all_have_entered_and_none_completes_is_a_device_or_a_network() -> None:
    assert of({rank: dump(entry("2", 5)) for rank in range(4)}).startswith("all ranks of group 'mplug group 1' have")
    assert of({rank: dump(entry("2", 5, state="completed")) for rank in range(4)}) == ""


def test_single_messages_and_unknown_groups_are_left_out() -> None:
    assert entered(dump(entry("1", 4, is_p2p=True))) == []
    assert entered(dump(entry("1", 4)), {}) == []


def test_dumps_in_files_are_read(tmp_path: Path) -> None:
    for rank, number in ((0, 7), (1, 6)):
        state = "started" if rank == 0 else "completed"
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(dump(entry("1", number, state=state))))
    assert of_files(sorted(tmp_path.iterdir())).startswith("rank 1 has not entered all_reduce number 7")


def test_the_error_of_a_silent_rank_names_the_collective() -> None:
    collective = asdict(Entered("mplug group 3", (0, 1), 12, "all_reduce", "[[8]]", None))
    fields: dict[str, Any] = {"host": "a", "pid": 1, "born": "", "phrase": "in step 5", "entered": 7, "collectives": {}}
    beat = Beat(rank=0, number=1, quiet=20, allowed=300, timeout=10, first=10, at="x.py:1 in f", **fields)
    listener = Listener(range(2))
    listener.hear(1, replace(beat, rank=1))
    for second in range(14):
        content = json.loads(json.dumps(asdict(replace(beat, number=second + 1, last_collectives=[collective]))))
        listener.hear(0, Beat(**content))
        listener.pass_time(1.0)
    listener.hear(0, replace(beat, number=99, last_collectives=[collective]))
    verdict = listener.verdict()
    assert verdict is not None
    assert verdict.ranks == (1,)
    assert verdict.text.endswith(
        "; rank 1 has not entered all_reduce number 12 of group 'mplug group 3', in which rank 0 waits"
    )


def hang(late: int) -> list[dict[str, Any]]:
    """All ranks sum twice; then all but one begin a third sum. The last collectives of this rank, meanwhile."""
    group = dist.new_group([0, 1, 2], group_desc="mplug group 0")
    x, found = torch.ones(4), list[dict[str, Any]]()
    for _ in range(2):
        dist.all_reduce(x, group=group)
    reader = threading.Thread(target=lambda: (time.sleep(1), found.extend(last_entered())))
    reader.start()
    if dist.get_rank() == late:
        reader.join()
    dist.all_reduce(x, group=group)
    reader.join()
    return found


def test_the_recorders_of_processes_with_gloo_name_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    found = run_workers(3, hang, 1)
    clause = analysis({rank: map(of_beat, one) for rank, one in enumerate(found)})
    assert clause == "rank 1 has not entered all_reduce number 3 of group 'mplug group 0', in which ranks 0 and 2 wait"


def test_a_setting_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    record(100)
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7"
