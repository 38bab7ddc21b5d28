"""Fla: what it serves, what it refuses and why, and which kernels it takes on a chip."""

from types import SimpleNamespace
from typing import Any

import pytest
from mplug_fla import Fla, limits
from mplug_fla.scans import scan, scan_by_channel
from offers import note, refusal, run

from mplug import DOCUMENTS, Offer, Site
from mplug_nn import ConvolutionSpec, ScanSpec
from mplug_nn.mixers.specification import CONVOLUTIONS, SCANS


def offers(slot: str = "Scan.core") -> list[Offer]:
    return [offer for offer in Fla(Fla.Config()).offer() if slot in offer.suppliers]


def site(spec: Any, *needs: str, slot: str = "Scan.core") -> Site:
    return Site("blocks.*.attn.scan", slot, SimpleNamespace(spec=spec), "blocks.0.attn.scan", frozenset(needs))


def of_scan(*needs: str, kind: Any = "delta", keys: int = 128, values: int = 128) -> Site:
    return site(ScanSpec(kind, 0.1, keys, values), *needs)


def machine(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0), triton: tuple[int, ...] = (3, 7, 1)
) -> None:
    """A machine as the plugin sees one: such a GPU, and this release of Triton beside the library."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.setattr(limits, "missing", lambda: "")
    monkeypatch.setattr(limits, "_release", lambda _: triton)


def answers(at: Site, during: Any) -> list[Any]:
    return [offer.answer(at, during) for offer in offers(at.slot)]


@pytest.mark.parametrize("kind", ["decay", "channel decay", "delta", "channel delta"])
def test_all_kinds_documents_and_states_are_served(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    machine(monkeypatch)
    needs = {"document_lengths", "states", kind} - {"decay"}
    assert answers(of_scan(*needs, kind=kind), run()) == [True, False]
    convolution = site(ConvolutionSpec(4), "document_lengths", "states", slot="Convolution.core")
    assert answers(convolution, run()) == [True]


@pytest.mark.parametrize(
    ("at", "during", "words"),
    [
        (of_scan(), run("cpu"), "needs a CUDA GPU, and this run is on the CPU"),
        (of_scan(), run(precision="fp32"), "computes in bf16, and trainer.precision=fp32 computes in float32"),
        (of_scan(), run(deterministic=True), "trainer.deterministic is set"),
        (of_scan("another rule"), run(), "does not offer another rule"),
        (of_scan(keys=320), run(), "widths of keys of 16 to 256, and this site's width is 320"),
        (of_scan(values=8), run(), "widths of values of 16 to 512, and this site's width is 8"),
        (site(ConvolutionSpec(9), slot="Convolution.core"), run(), "over 2 to 8 positions, and this one spans 9"),
        (site(ConvolutionSpec(4), slot="Convolution.core"), run("cpu"), "needs a CUDA GPU"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, at: Site, during: Any, words: str
) -> None:
    machine(monkeypatch)
    assert words in refusal(offers(at.slot), at, during)


def test_chips_before_ampere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, (7, 5))
    assert "8.0 and newer, and this GPU has 7.5" in refusal(offers(), of_scan(), run())


def test_slots_of_the_same_name_with_another_specification_are_not_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    assert answers(site(SimpleNamespace()), run()) == [False, False]
    assert answers(site(ScanSpec("decay", 1.0, 64, 64), slot="Convolution.core"), run()) == [False]


@pytest.mark.parametrize(
    ("capability", "triton", "kind", "supplier"),
    [
        ((9, 0), (3, 6, 0), "delta", scan_by_channel),
        ((9, 0), (3, 4, 0), "decay", scan_by_channel),
        ((9, 0), (3, 6, 0), "channel delta", scan),
        ((9, 0), (3, 6, 0), "channel decay", scan),
        ((9, 0), (3, 7, 1), "delta", scan),
        ((9, 0), (3, 3, 1), "delta", scan),
        ((8, 0), (3, 6, 0), "delta", scan),
        ((10, 0), (3, 6, 0), "decay", scan),
    ],
)
def test_kernels_that_a_compiler_breaks_are_not_taken_and_the_report_says_so(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], triton: tuple[int, ...], kind: Any, supplier: Any
) -> None:
    machine(monkeypatch, capability, triton)
    at = of_scan(kind=kind) if kind == "decay" else of_scan(kind, kind=kind)
    (taken,) = (offer for offer in offers() if offer.answer(at, run()) is True)
    assert taken.suppliers["Scan.core"] is supplier
    words = f"decays per channel, because Triton {'.'.join(map(str, triton))} miscompiles decays per head"
    assert note(offers(), at, run()) == (words if supplier is scan_by_channel else "")


@pytest.mark.parametrize(
    ("release", "words"),
    [(None, "is not installed; install 'mplug-fla[fla]'"), ((0, 5, 1), "it supports fla-core 0.6, and")],
)
def test_a_library_that_is_missing_or_of_another_release_is_refused(
    monkeypatch: pytest.MonkeyPatch, release: Any, words: str
) -> None:
    def found(name: str) -> Any:
        if release is None:
            raise limits.PackageNotFoundError(name)
        return release

    monkeypatch.setattr(limits, "_release", found)
    monkeypatch.setattr(limits, "version", lambda _: "0.5.1")
    limits.missing.cache_clear()
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    assert words in refusal(offers("Convolution.core"), site(ConvolutionSpec(4), slot="Convolution.core"), run())
    limits.missing.cache_clear()


def test_versions_are_numbers_up_to_the_first_word() -> None:
    assert limits._release.__wrapped__("mplug-fla") == (0, 1, 0)


def test_its_offers_say_what_they_serve_as_data() -> None:
    for offer in offers():
        assert (offer.devices, offer.dtypes, offer.chips, offer.serves) == (("cuda",), ("bfloat16",), ("8.0+",), SCANS)
    assert offers("Convolution.core")[0].serves == CONVOLUTIONS


def test_a_graph_replays_the_kernels_unless_the_cpu_reads_lengths_of_documents() -> None:
    packed, whole = (SimpleNamespace(entries=frozenset(entries)) for entries in ([DOCUMENTS], []))
    assert Fla(Fla.Config()).captures(whole) is True
    assert "lengths of packed documents" in str(Fla(Fla.Config()).captures(packed))
