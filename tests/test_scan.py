"""A block, a slot and a kind of slot that mplug does not know: declared, supplied and wrapped by other packages."""

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from mplug import Offer, UsageError
from mplug.model.build import build_model, unmet_reasons
from mplug.registry.entry_points import Registry
from mplug_estimates import alternatives
from mplug_testing.harness import difference, tiny_config, tiny_run, train_ranks, train_steps

SCANNER: dict[str, Any] = {"model.name": "scanner", "model.preset": None, "trainer.seq_length": 12}
DOUBLING = {**SCANNER, "kernels.scan": "doubling"}
HALVES = {"extensions.halves": {}}
Plant = Callable[..., None]


@pytest.fixture(autouse=True)
def installed(plant: Plant) -> None:
    plant("acme-scan")
    plant("zenith-scan")


def contents(settings: dict[str, Any]) -> set[tuple[str, str, tuple[str, ...]]]:
    slots = [one for one in build_model(tiny_run(settings)).slots if one.site.slot == "Scan.core"]
    return {(one.site.role, one.supplier, tuple(wrap.plugin for wrap in one.wraps)) for one in slots}


def test_a_slot_of_a_third_party_is_filled_by_the_plugin_that_the_config_names_for_its_kind() -> None:
    assert contents(SCANNER) == {("blocks.*.scan", "plain torch", ())}
    for name in ("matrix", "doubling"):
        assert contents({**SCANNER, "kernels.scan": name}) == {("blocks.*.scan", f"kernels/{name}", ())}
        assert contents({**SCANNER, "kernels.default": name}) == {("blocks.*.scan", f"kernels/{name}", ())}
    assert contents({**DOUBLING, **HALVES}) == {("blocks.*.scan", "kernels/doubling", ("extensions/halves",))}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.wide("layouts", quick=["False"])
def test_both_suppliers_and_the_wrap_train_as_the_default_does(reverse: bool) -> None:
    plain = {**SCANNER, "model.reverse": reverse, "kernels.default": None}
    expected = train_steps(plain)
    for name in ("doubling",) if reverse else ("doubling", "matrix"):
        for more in ({}, HALVES):
            assert difference([train_steps({**plain, "kernels.scan": name, **more})], expected) == ""
    if not reverse:
        assert difference(train_ranks(2, {**DOUBLING, **HALVES, "parallel.layout": "dp2"}), expected) == ""


def test_explain_shows_the_supplier_and_the_wrap(cli: Callable[..., Any]) -> None:
    words = ("--model", "scanner", "--kernels", "scan=doubling", "--set", "extensions.halves={}")
    shown = cli("explain", *words, path=f"{sys.path[0]}{os.pathsep}{sys.path[1]}")
    assert shown.returncode == 0, shown.stderr
    (row,) = [line.split() for line in shown.stdout.splitlines() if "Scan.core" in line]
    assert row[-3:] == ["Scan.core", "kernels/doubling", "extensions/halves"]


def test_a_need_that_a_supplier_does_not_declare_refuses_it_and_another_is_proposed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(alternatives, "_can_serve", lambda _, *named: tuple(named) == ("scan", "doubling"))
    with pytest.raises(UsageError) as refused:
        build_model(tiny_run({**SCANNER, "model.reverse": True, "kernels.scan": "matrix"}))
    assert str(refused.value) == (
        "kernels/matrix cannot serve Scan.core of 'blocks.*.scan': it does not offer reverse; doubling can serve it: "
        "set kernels.scan=doubling"
    )


# Kinds and slots that a model lacks, and words that are misspelt.


def test_a_supplier_of_a_slot_that_the_model_lacks_is_no_error_and_a_published_kind_names_no_kernel() -> None:
    Offer({"Whatever.part": print})
    assert unmet_reasons(tiny_run({"kernels.scan": "doubling"})) == []
    assert "rename the plugin" in Registry().name_fault("kernels", "scan")
    assert Registry().name_fault("kernels", "doubling") == ""


def test_kinds_and_slots_that_nothing_declares_are_refused_with_did_you_mean(plant: Plant) -> None:
    with pytest.raises(UsageError, match=r"^kernels\.scam .*did you mean 'scan'"):
        tiny_config({**SCANNER, "kernels.scam": "doubling"})
    plant("zenith-scan", 'kernel("Scan.core"', 'kernel("Scan.cor"')
    with pytest.raises(UsageError, match=r"kernels/doubling offers a supplier for 'Scan\.cor'.*mean 'Scan\.core'"):
        build_model(tiny_run(DOUBLING))


def test_a_kind_that_no_package_publishes_is_known_from_the_model_alone(plant: Plant) -> None:
    plant("acme-scan", 'Slot("Scan.core", "scan", scan', 'Slot("Scan.core", "passing", scan')
    assert contents({**SCANNER, "kernels.passing": "doubling"}) == {("blocks.*.scan", "kernels/doubling", ())}
    with pytest.raises(
        UsageError, match=r"^kernels\.passing .*no block of models/gpt has a slot of the kind 'passing'"
    ):
        build_model(tiny_run({"kernels.passing": "doubling"}))


def test_blocks_that_declare_one_slot_differently_are_refused_with_both_names(plant: Plant) -> None:
    block = "class Block(nn.Module):"
    plant("acme-scan", block, f"{block}\n    SLOTS = (Slot('Scan.core', 'other'),)\n")
    with pytest.raises(UsageError, match=r"acme_scan\.decoder\.Block and acme_scan\.decoder\.Scan declare the slot"):
        build_model(tiny_run(SCANNER))
