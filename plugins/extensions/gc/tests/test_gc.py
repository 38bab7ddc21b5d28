"""Automatic collections are off during training, and every n-th step collects, as the metrics say."""

import gc
from pathlib import Path
from typing import Any

import pytest

from mplug import hookimpl
from mplug.registry.hooks import HOST
from mplug.run.prepare import prepare
from mplug.training.loop import train
from mplug_testing import ExtensionSuite
from mplug_testing.harness import tiny_config


class TestGarbageCollection(ExtensionSuite):
    plugin = "gc"
    settings = {"extensions.gc.every": 2}


class Records:
    def __init__(self) -> None:
        self.found: dict[int, Any] = {}
        self.enabled: set[bool] = set()

    @hookimpl
    def step_finished(self, record: Any) -> None:
        self.found[record["step"]] = record
        self.enabled.add(gc.isenabled())


@pytest.mark.wide("loggers", quick=["True"])
@pytest.mark.parametrize("enabled", [True, False])
def test_only_every_second_step_collects_and_python_s_setting_returns(enabled: bool, tmp_path: Path) -> None:
    records, before = Records(), gc.isenabled()
    config = tiny_config({"trainer.steps": 5, "extensions.gc.every": 2})
    run = prepare(config, {f"{HOST}records": records}, tmp_path)
    run.device = "cpu"
    (gc.enable if enabled else gc.disable)()
    try:
        train(run)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert records.enabled == {False}
    assert [step for step, one in records.found.items() if "gc_s" in one] == [2, 4]
    assert all(0 < records.found[step]["gc_s"] < 60 for step in (2, 4))
