"""The commands about plugins pass the suite of commands."""

from unittest import SkipTest

import pytest

from mplug_testing import CommandSuite, models, published


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
