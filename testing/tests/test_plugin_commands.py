"""The commands about plugins pass the suite of commands."""

import time
from pathlib import Path
from unittest import SkipTest

import pytest

from mplug_testing import CommandSuite, inspection, models, published


class TestShow(CommandSuite):
    plugin = "plugins.show"
    refused = ((), ("nowhere",))


class TestCheck(CommandSuite):
    plugin = "plugins.check"
    refused = (("nowhere",),)


class TestNew(CommandSuite):
    plugin = "plugins.new"
    refused = (("acme-ringo",), ("--kind", "wheels", "acme-ringo"), ("--kind", "kernels", "Acme Ringo"))


def test_the_check_of_a_large_family_compares_no_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """`plugins check` runs families at their default sizes, some of which have billions of elements."""
    suite = type("Check", (models.ModelSuite,), {"plugin": "bert", "settings": {"model.preset": "tiny"}})
    suite().test_its_external_names_cover_it()
    monkeypatch.setattr(published, "MOST", 1000)
    with pytest.raises(SkipTest, match="too many to compare"):
        suite().test_its_external_names_cover_it()


def test_a_late_check_is_interrupted_so_that_it_releases_its_locks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A build of torch that is killed leaves a lock, and every later build of the extension waits for it forever."""

    def build(*_: str) -> inspection.Report:
        (tmp_path / "lock").touch()
        try:
            time.sleep(60)
        finally:
            (tmp_path / "lock").unlink()
        return inspection.Report()

    monkeypatch.setattr(inspection, "TIMEOUT", 1)
    inspection.report_in_time(build, "optimizers", "acme/slow")
    assert "'mplug plugins test optimizers/slow' has no limit" in capsys.readouterr().out
    assert not (tmp_path / "lock").exists()
