"""The pictures in docs/pictures are what the script draws from the tables and meshes of runs."""

import re
from pathlib import Path
from types import ModuleType

import pytest
import scripts

from mplug.registry.entry_points import Registry

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return scripts.script("docs/pictures.py")


def test_the_pictures_are_those_of_the_script(script: ModuleType) -> None:
    drawn = dict(script.pictures())
    assert {file.name for file in (DOCS / "pictures").iterdir()} == {*drawn}
    for name, text in drawn.items():
        assert (DOCS / "pictures" / name).read_text(encoding="utf-8") == text, name


def test_every_bundled_schedule_has_a_picture_with_all_passes(script: ModuleType) -> None:
    registry = Registry()
    bundled = {entry.name for entry in registry.entries("schedules") if entry.distribution == "mplug-pp"}
    assert {*script.SCHEDULES} == bundled
    for name in bundled:
        forward = re.findall(r">F(\d+)<", (DOCS / "pictures" / f"schedule_{name}.svg").read_text())
        chunks = len(forward) / script.MICRO_BATCHES / script.RANKS
        assert chunks in (1, 2)
        assert {int(number) for number in forward} == {*range(script.MICRO_BATCHES)}


def test_each_rank_of_a_layout_is_in_the_box_of_its_group(script: ModuleType) -> None:
    text = (DOCS / "pictures" / "layout.svg").read_text()
    assert re.findall(r'text-anchor="middle">(\d+)<', text) == [str(rank) for rank in range(8)]
    boxes = re.findall(r">((?:pp|dp|tp) \d)<", text)
    assert boxes[:4] == ["pp 0", "dp 0", "tp 0", "tp 1"]
    assert boxes.count("tp 0") == 4
