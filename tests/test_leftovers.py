"""What is left behind is found, whatever it is; what a process opens once for all is not."""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mplug_testing import Fault
from mplug_testing.leftovers import nothing_left


@pytest.fixture
def kept() -> Iterator[list[Callable[[], object]]]:
    """What is done at the end of a test, to be left with nothing after all."""
    actions: list[Callable[[], object]] = []
    yield actions
    for action in actions:
        action()


def test_what_is_closed_joined_and_waited_for_is_not_left(tmp_path: Path) -> None:
    def use() -> None:
        tmp_path.joinpath("written").write_text("text")
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
        subprocess.run(["true"], check=True)

    nothing_left("it", use)


def test_a_thread_that_is_told_to_end_may_take_a_moment() -> None:
    told: list[threading.Event] = []

    def use() -> None:
        told.append(threading.Event())
        threading.Thread(target=told[-1].wait).start()
        told[-1].set()

    nothing_left("it", use)


def test_a_thread_that_waits_is_left(kept: list[Callable[[], object]]) -> None:
    def use() -> None:
        event = threading.Event()
        kept.append(event.set)
        threading.Thread(target=event.wait, name="reader").start()

    with pytest.raises(Fault, match="it leaves the thread 'reader' running"):
        nothing_left("it", use)


def test_an_open_descriptor_is_left(tmp_path: Path, kept: list[Callable[[], object]]) -> None:
    def use() -> None:
        descriptor = os.open(tmp_path / "index.bin", os.O_CREAT | os.O_RDWR)
        kept.append(lambda: os.close(descriptor))

    with pytest.raises(Fault, match=r"it leaves open: .*index\.bin"):
        nothing_left("it", use)


def test_a_file_that_was_forgotten_is_left(tmp_path: Path) -> None:
    def use() -> None:
        tmp_path.joinpath("index.txt").open("w")

    with pytest.raises(Fault, match=r"it leaves resources unclosed: unclosed file .*index\.txt"):
        nothing_left("it", use)


def test_a_child_process_that_somebody_still_holds_is_left(kept: list[Callable[[], object]]) -> None:
    def use() -> None:
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        kept.append(lambda: child.communicate())

    with pytest.raises(Fault, match="it leaves a child process running: cat"):
        nothing_left("it", use)


def test_what_is_opened_once_for_all_may_stay(tmp_path: Path, kept: list[Callable[[], object]]) -> None:
    def use() -> None:
        if not kept:
            descriptor = os.open(tmp_path / "cache.bin", os.O_CREAT | os.O_RDWR)
            kept.append(lambda: os.close(descriptor))

    nothing_left("it", use)
