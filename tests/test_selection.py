"""Which supplier fills a site, which wraps surround it, and what is refused: `select` over sites and offers."""

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mplug import Offer, Site, Supplier, UsageError, Wrap, set_defaults
from mplug.config.binding import Kernels
from mplug.layout.names import role_of
from mplug.model.slots.offers import PLAIN
from mplug.model.slots.selection import Selection, select
from mplug_nn import SLOTS

CORE, NORM, NARROW, WIDE = "Attention.core", "Norm.norm_residual", "Attention.prepare_qk", "Attention.prepare_qkv"
PRODUCT, GEMM, GATHER, SCATTER, MLP = "Linear.product", "Linear.gemm", "Linear.gather", "Linear.scatter", "MLP.core"
FAST, ALL, TP = "kernels/fast", "kernels/all", "parallel/tp"
LINEAR = (PRODUCT, GEMM, GATHER, SCATTER)


def at(slot: str, *needs: str, name: str = "blocks.0.part") -> Site:
    """The site of a slot of a block that declares it, with its default."""
    block = type("Block", (), {"SLOTS": (SLOTS[slot],)})()
    set_defaults(block)
    return Site(role_of(name), slot, block, name, frozenset(needs))


def offer(plugin: str, *slots: str, answer: bool | str = True, supplier: Any = print, **data: Any) -> Offer:
    return Offer(dict.fromkeys(slots, supplier), lambda *_: answer, plugin=plugin, **data)


def wrap(plugin: str, slot: str, layer: int = 0, answer: bool | str = True, **data: Any) -> Wrap:
    sets = {name: frozenset(value) for name, value in data.items()}
    return Wrap(slot, lambda inner: inner, layer, supports=lambda *_: answer, plugin=plugin, **sets)


def selected(
    sites: Iterable[Site | str],
    offers: Any,
    default: str | tuple[str, ...] | None = None,
    graphs: bool = False,
    **kinds: str | None,
) -> Selection:
    there = [at(one) if isinstance(one, str) else one for one in sites]
    offers = [offers] if isinstance(offers, Offer | Wrap) else offers
    kernels = Kernels(kinds, None, default) if isinstance(default, tuple) else Kernels(kinds, default)
    run = SimpleNamespace(config=SimpleNamespace(kernels=kernels, trainer=SimpleNamespace(graphs=graphs)))
    return select(there, offers, kernels, run, known=SLOTS)  # type: ignore[arg-type]


def suppliers(*given: Any, **kinds: str | None) -> list[str]:
    """The supplier of each site, where nothing is unmet."""
    found = selected(*given, **kinds)
    assert found.unmet == []
    return [filled.supplier for filled in found.filled]


def unmet(*given: Any, **kinds: str | None) -> list[str]:
    return [str(one) for one in selected(*given, **kinds).unmet]


def refusal(*given: Any, **kinds: str | None) -> str:
    with pytest.raises(UsageError) as refused:
        selected(*given, **kinds)
    return str(refused.value)


# Suppliers.


def test_a_kernel_fills_the_kinds_that_it_is_named_for_and_no_other() -> None:
    offers = [offer(FAST, CORE), offer(FAST, NORM), offer("kernels/other", CORE)]
    assert suppliers([CORE, NORM], offers, attention=FAST, linear="kernels/other") == [FAST, PLAIN]


def test_a_default_kernel_fills_what_it_can_except_kinds_that_are_named() -> None:
    offers = [offer(FAST, CORE), offer(ALL, CORE), offer(ALL, NORM)]
    assert suppliers([CORE, NORM, GEMM], offers, ALL, attention=FAST) == [FAST, ALL, PLAIN]
    assert suppliers([CORE, NORM], offers[1:], ALL, attention=None) == [PLAIN, ALL]


def test_of_several_default_kernels_the_fastest_that_serves_a_site_fills_it() -> None:
    slow, fast = offer(ALL, CORE, rate=1.0, serves={"window"}), offer(FAST, CORE, rate=2.0)
    both, plain, local = (ALL, FAST), at(CORE), at(CORE, "window", name="blocks.1.part")
    assert suppliers([plain, local], [slow, fast], both) == [FAST, ALL]
    assert suppliers([plain], [slow, fast], both, attention=ALL) == [ALL]
    assert suppliers([plain], [slow, fast], both, attention=None) == [PLAIN]
    assert suppliers([plain], [offer(ALL, CORE, rate=2.0), fast], both) == [ALL], "the first of equal rates"
    assert suppliers([plain], [offer(ALL, CORE), fast], both) == [FAST], "an offer without a rate does not compete"
    assert suppliers([NORM], [offer(FAST, NORM)], both) == [PLAIN]
    assert suppliers([plain], [slow, fast, offer(TP, CORE)], both) == [TP], "they give way to a strategy"


@pytest.mark.parametrize("unknown", [None, "has not been tested"])
def test_in_a_graph_a_default_kernel_that_states_that_it_can_be_replayed_precedes_faster_ones(unknown: Any) -> None:
    stated, faster = offer(ALL, CORE, rate=1.0, captures=True), offer(FAST, CORE, rate=2.0, captures=unknown)
    found = selected([CORE], [stated, faster], (ALL, FAST), graphs=True)
    assert [(one.supplier, len(one.rivals)) for one in found.filled] == [(ALL, 2)]
    assert suppliers([CORE], [stated, faster], (ALL, FAST)) == [FAST]
    other = replace(stated, captures=unknown)
    assert [one.supplier for one in selected([CORE], [other, faster], (ALL, FAST), graphs=True).filled] == [FAST]


def test_a_site_that_no_default_kernel_serves_keeps_plain_torch_if_that_serves_it() -> None:
    both, refusing = (ALL, FAST), [offer(ALL, CORE, answer="too wide", rate=1.0), offer(FAST, CORE, rate=2.0)]
    assert suppliers([at(CORE, "window")], refusing, both) == [PLAIN]
    found = unmet([at(CORE, "linear attention")], refusing, both)
    assert [one.partition(": ")[2] for one in found] == ["it does not offer linear attention"] * 2


def test_an_offer_of_several_slots_fills_them_all_or_none() -> None:
    both = offer("kernels/fused", NORM, GEMM)
    assert suppliers([NORM, GEMM], both, norm="kernels/fused", linear="kernels/fused") == ["kernels/fused"] * 2
    found = selected([NORM, GEMM], both, norm="kernels/fused")
    assert [filled.supplier for filled in found.filled] == [PLAIN, PLAIN]
    assert [(one.kind, one.plugin) for one in found.unmet] == [("norm", "kernels/fused")]


@pytest.mark.parametrize(("one", "other"), [(FAST, TP), (TP, "parallel/acme"), (FAST, FAST)])
def test_two_suppliers_of_one_site_are_refused_with_both_names(one: str, other: str) -> None:
    said = refusal([GEMM], [offer(one, GEMM), offer(other, GEMM)], linear=FAST)
    assert said.startswith(f"{one} and {other} both fill Linear.gemm of 'blocks.*.part'")


def test_a_supplier_that_cannot_does_not_conflict() -> None:
    offers = [offer(FAST, GEMM, answer="another chip"), offer(TP, GEMM)]
    assert [filled.supplier for filled in selected([GEMM], offers, linear=FAST).filled] == [TP]


def test_a_named_kernel_must_fill_one_site_of_its_kind() -> None:
    only_first = Offer({CORE: print}, lambda site, _: site.name == "blocks.0.attn", plugin=FAST)
    there = [at(CORE, name=f"blocks.{number}.attn") for number in range(2)]
    assert suppliers(there, only_first, attention=FAST) == [FAST, PLAIN]
    wide = offer(FAST, WIDE)
    assert unmet([NARROW], wide, qk=FAST) == [
        "kernels/fast cannot serve Attention.prepare_qk of 'blocks.*.part': it fills none of the slots of the kind "
        "'qk' that this model has"
    ]
    assert unmet([NARROW, WIDE], wide, qk=FAST) == unmet([CORE], wide, qk=FAST) == []
    (said,) = unmet([CORE], offer(FAST, NORM), attention=FAST)
    assert said.endswith("it offers no supplier for slots of the kind 'attention' alone")


def test_a_partial_offer_may_serve_some_sites_but_not_none() -> None:
    def supports(site: Site, _: object) -> bool | str:
        return site.name != "blocks.1.attn" or "it is odd"

    there = [at(CORE, name=f"blocks.{number}.attn") for number in range(2)]
    for partial, refused in ((False, 1), (True, 0)):
        found = selected(there, Offer({CORE: print}, supports, plugin=FAST, partial=partial), attention=FAST)
        assert [filled.supplier for filled in found.filled] == [FAST, PLAIN]
        assert len(found.unmet) == refused
    assert unmet(there[1:], Offer({CORE: print}, supports, plugin=FAST, partial=True), attention=FAST) == [
        "kernels/fast cannot serve Attention.core of 'blocks.*.attn': it is odd"
    ]


# Wraps.


def test_wraps_are_ordered_by_layer_whatever_the_order_of_their_plugins() -> None:
    offers = [*(wrap(f"parallel/{layer}", CORE, layer) for layer in (5, 9, -1)), wrap("parallel/0", NORM)]
    (filled,) = selected([CORE], offers).filled
    assert [one.plugin for one in filled.wraps] == ["parallel/-1", "parallel/5", "parallel/9"]


def test_two_plugins_that_wrap_a_slot_at_one_layer_are_refused_with_both_names() -> None:
    said = refusal([CORE], [wrap("parallel/a", CORE, 5), wrap("parallel/b", CORE, 5)])
    assert said.startswith("parallel/a and parallel/b both wrap Attention.core of 'blocks.*.part' at layer 5")
    assert len(selected([CORE], [wrap("parallel/a", CORE, 5)] * 2).filled[0].wraps) == 2


def test_a_wrap_that_does_not_apply_is_left_out_and_one_that_cannot_is_unmet() -> None:
    found = selected([CORE], wrap(TP, CORE, answer=False, needs={"lse"}))
    assert (found.filled[0].wraps, found.unmet) == ((), [])
    assert unmet([CORE], wrap(TP, CORE, answer="it is odd")) == [
        "parallel/tp cannot serve Attention.core of 'blocks.*.part': it is odd"
    ]


# Needs.


def test_a_supplier_is_asked_with_the_needs_of_the_site_and_of_its_wraps() -> None:
    asked: list[frozenset[str]] = []

    def supports(site: Site, _: Any) -> bool | str:
        asked.append(site.needs)
        return "no log-sum-exp"

    needs = {"lse", "varlen", "full attention"}
    wraps = [wrap(TP, CORE, n, needs={need}, serves={"full attention"}) for n, need in enumerate(("lse", "varlen"))]
    fast = Offer({CORE: print}, supports, plugin=FAST, serves=needs)
    (said,) = unmet([at(CORE, "full attention")], [*wraps, fast], attention=FAST)
    assert said.endswith("no log-sum-exp")
    assert asked == [needs]


def test_a_need_that_nothing_declares_is_unmet_without_a_question() -> None:
    (said,) = unmet([at(CORE, "alibi bias")], offer(FAST, CORE), FAST)
    assert said.startswith(FAST)
    assert said.endswith("it does not offer alibi bias")
    (said,) = unmet([CORE], wrap(TP, CORE, needs={"lse"}))
    assert said == "plain torch cannot serve Attention.core of 'blocks.*.part': it does not offer lse"
    of_wrap = wrap(TP, CORE, needs={"log-sum-exp"}, serves={"document_lengths"})
    assert unmet([at(CORE, "document_lengths")], of_wrap) == []


def test_a_wrap_serves_what_it_names_and_one_that_calls_again_what_is_inside_serves_everything() -> None:
    windowed = wrap(TP, CORE, 50, serves={"window"})
    assert unmet([CORE], windowed) == unmet([at(CORE, "window")], windowed) == []
    assert unmet([at(CORE, "window", "soft cap")], windowed) == [
        "parallel/tp cannot serve Attention.core of 'blocks.*.part': the site needs soft cap, and the plugin's wrap "
        "does not declare it in Wrap.serves"
    ]
    assert unmet([at(CORE, "attention sinks")], wrap("memory/x", CORE, 1000)) == []


def test_a_need_of_a_linear_is_met_by_its_product_or_its_gemm() -> None:
    there = [at(PRODUCT, "r"), at(GEMM, "r"), GATHER, SCATTER]
    assert suppliers(there, offer(FAST, PRODUCT, serves={"r"}), linear=FAST) == [FAST, PLAIN, PLAIN, PLAIN]
    assert suppliers(there, offer(FAST, GEMM, serves={"r"}), linear=FAST) == [PLAIN, FAST, PLAIN, PLAIN]
    assert unmet(there, offer(FAST, GEMM), linear=FAST) == [
        "kernels/fast cannot serve Linear.gemm of 'blocks.*.part': it does not offer r"
    ]
    assert unmet(there, offer(FAST, PRODUCT, answer="it needs a GPU", serves={"r"}), linear=FAST) == [
        "kernels/fast cannot serve Linear.product of 'blocks.*.part': it needs a GPU"
    ]


# A slot and the wider one around it.


@pytest.mark.parametrize("put", [wrap, offer])
def test_what_a_strategy_puts_into_a_slot_is_not_lost_in_a_wider_one(put: Any) -> None:
    both = [put("parallel/x", NARROW), offer("kernels/fused", WIDE)]
    said = refusal([NARROW, WIDE], both, qk="kernels/fused")
    assert said.startswith("kernels/fused replaces Attention.prepare_qkv of 'blocks.*.part' as a whole, so the part")
    assert said.endswith("; set kernels.qk=null, or use a layout without parallel/x")
    elsewhere = [at(NARROW, name="blocks.1.attn"), at(WIDE, name="blocks.0.attn")]
    assert suppliers(elsewhere, both, qk="kernels/fused")[1] == "kernels/fused"


@pytest.mark.parametrize("put", [wrap, offer])
@pytest.mark.parametrize("place", ["up Linear.gemm", "up Linear.scatter", "down Linear.gather", "down Linear.gemm"])
def test_what_is_put_into_a_part_of_a_module_is_not_lost_in_the_slot_around_it(put: Any, place: str) -> None:
    part, slot = place.split()
    there = [at(MLP, name="blocks.0.mlp"), at(slot, name=f"blocks.0.mlp.{part}")]
    said = refusal(there, [put("parallel/x", slot), offer(FAST, MLP)], mlp=FAST)
    assert said.startswith(f"kernels/fast replaces MLP.core of 'blocks.*.mlp.{part}' as a whole, so the part that ")
    assert f"parallel/x puts into {slot} would never run; set kernels.mlp=null" in said


@pytest.mark.parametrize("place", [("mlp.up", GATHER), ("mlp.down", SCATTER), ("attn.up", GEMM), ("up", GEMM)])
def test_a_wider_slot_leaves_what_is_around_it_and_what_is_elsewhere(place: tuple[str, str]) -> None:
    part, slot = place
    there = [at(MLP, name="blocks.0.mlp"), at(slot, name=f"blocks.0.{part}")]
    assert suppliers(there, [offer("parallel/x", slot), offer(FAST, MLP)], mlp=FAST) == [FAST, "parallel/x"]


def test_a_kernel_may_fill_a_slot_and_the_wider_one_and_the_default_one_gives_way() -> None:
    both = [offer(ALL, NARROW), offer(ALL, WIDE)]
    assert suppliers([NARROW, WIDE], both, ALL) == [ALL, ALL]
    assert suppliers([NARROW, WIDE], [both[0], offer(TP, WIDE)], ALL) == [ALL, TP]


def test_a_gemm_runs_only_in_a_product_that_states_that_it_calls_it() -> None:
    gemm, calling = offer(TP, GEMM), Supplier(print, calls=(GEMM,))
    assert "parallel/tp puts into Linear.gemm would never run" in refusal(
        LINEAR, [offer(FAST, PRODUCT), gemm], linear=FAST
    )
    assert suppliers(LINEAR, [offer(FAST, PRODUCT, supplier=calling), gemm], linear=FAST) == [FAST, TP, PLAIN, PLAIN]


def test_a_fallback_gives_way_to_a_named_kernel_and_to_a_wider_slot() -> None:
    own = offer(TP, PRODUCT, fallback=True)
    assert suppliers(LINEAR, own) == [TP, PLAIN, PLAIN, PLAIN]
    assert suppliers(LINEAR, [own, offer(FAST, PRODUCT)], linear=FAST) == [FAST, PLAIN, PLAIN, PLAIN]
    there = [at(PRODUCT, "r"), at(GEMM, "r")]
    assert suppliers(there, [own, offer(FAST, GEMM, serves={"r"})], linear=FAST) == [PLAIN, FAST]
    mlp, core = [at(MLP, name="mlp"), at(PRODUCT, name="mlp.up")], offer(FAST, MLP)
    assert suppliers(mlp, own) == [PLAIN, TP]
    assert suppliers(mlp, [own, core], mlp=FAST) == [FAST, PLAIN]
    assert "parallel/tp puts into Linear.product would never run" in refusal(mlp, [offer(TP, PRODUCT), core], mlp=FAST)
