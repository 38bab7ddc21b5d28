"""Jotter keeps the contract of data plugins."""

from pathlib import Path

from mplug_testing import DataSuite

NOTES = Path(__file__).with_name("notes.jsonl")


class TestJotter(DataSuite):
    plugin = "jotter"
    settings = {"data.path": str(NOTES)}
    examples = {"field": ["title"]}  # which the file does not have


class TestJotterWithABuffer(TestJotter):
    settings = {"data.path": str(NOTES), "data.shuffle_buffer": 30}
