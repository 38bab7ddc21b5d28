"""External names: each form of a map, against torch operations that say the same; every way in which they are wrong."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from mplug import Axis, Init, Mesh, Parameter, Placement, Segment
from mplug_pretrained import ExternalMap, ExternalNames, Factor, Fused, Interleaved, Transposed
from mplug_pretrained.expansion import Conversion, conversion_of
from mplug_pretrained.transfer import fill_ours, fill_theirs

G, R, K, D, E, F = 2, 3, 4, 6, 3, 8
QKV = (Segment("heads", G * R, K), Segment("kv_heads", G, K, uneven="copy"), Segment("kv_heads", G, K, uneven="copy"))
GATED = (Segment("mlp", F), Segment("mlp", F))
DIMS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "qkv": ((QKV, "embed"), ((R + 2) * G * K, D)),
    "q": ((Segment("heads", G * R, K), "embed"), (G * R * K, D)),
    "up": ((GATED, "embed"), (2 * F, D)),
    "down": (("embed", Segment("mlp", F)), (D, F)),
    "experts": (("expert", GATED, "embed"), (E, 2 * F, D)),
    "bias": ((GATED,), (2 * F,)),
}
MESH = Mesh.of([Axis("tp", 2, splits=("heads", "kv_heads", "mlp"))], 2)


def placed(name: str, mesh: Mesh = MESH) -> Placement:
    dims, shape = DIMS[name]
    return Placement(name, Parameter(dims, Init("constant")), shape, mesh)


def conversion(name: str, external: Any) -> Conversion:
    return conversion_of(ExternalNames({name: external}), {name: placed(name)})


def numbers(shape: tuple[int, ...], first: int = 0) -> Tensor:
    return torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.float64).view(shape)


EACH, WIDTH, LENGTH = Factor("h", G * R), Factor("d", D), Factor("f", F)
PAIR, HALF = Factor("pair", K // 2), Factor("half", 2)
HALVES = (ExternalMap(((EACH, HALF, PAIR), (WIDTH,)), "q", ((EACH, PAIR, HALF), (WIDTH,))),)
"""Rotated pairs: theirs has the two numbers of a pair side by side, ours in two halves."""
A2, B3, B4, C4, E2 = (Factor(name, size) for name, size in (("a", 2), ("b", 3), ("b", 4), ("c", 4), ("e", 2)))
RESHAPED = (ExternalMap(((WIDTH,), (A2, B4)), "x", ((B4,), (A2,), (WIDTH,))),)
CROSSED = (ExternalMap(((A2, B3), (C4, E2)), "x", ((B3, A2), (E2, C4))),)
"""In both dimensions of both tensors two factors."""
DEALT = tuple(
    ExternalMap(((Factor("n", D, place, D // 2, 2),), (LENGTH,)), f"{name}.{{n}}", ((LENGTH,),))
    for place, name in enumerate(("even", "odd"))
)
"""Every row has a public tensor of its own; even and odd rows have other names."""
BESIDE = tuple(
    ExternalMap(
        ((Factor("s", 2, place, 1), LENGTH), (WIDTH,)), "x", ((LENGTH,), (WIDTH,), (Factor("which", 2, place, 1),))
    )
    for place in range(2)
)
"""The last dimension of theirs says which segment of ours."""


def grouped() -> tuple[ExternalMap, ...]:
    """Megatron's order: for each group its R queries, a key and a value; ours has all queries, all keys, all values."""
    starts = [*((number, R) for number in range(R)), (G * R, 1), (G * (R + 1), 1)]
    rest = Factor("k", K), (Factor("d", D),)
    return tuple(
        ExternalMap(
            ((Factor("g", (R + 2) * G, start, G, step), rest[0]), rest[1]),
            "fused",
            ((Factor("g", G), Factor("in", R + 2, place, 1), rest[0]), rest[1]),
        )
        for place, (start, step) in enumerate(starts)
    )


def ungrouped(fused: Tensor) -> Tensor:
    parts = fused.view(G, R + 2, K, D)
    return torch.cat([parts[:, :R].reshape(-1, D), parts[:, R].reshape(-1, D), parts[:, R + 1].reshape(-1, D)])


CASES: dict[str, tuple[str, Any, Any]] = {
    "copied": ("down", "a", lambda t: t["a"]),
    "transposed": ("down", Transposed("a"), lambda t: t["a"].t()),
    "fused": ("qkv", Fused("q", "k", "v"), lambda t: torch.cat([t["q"], t["k"], t["v"]])),
    "fused and transposed": (
        "up",
        Fused(Transposed("g"), Transposed("u")),
        lambda t: torch.cat([t["g"].t(), t["u"].t()]),
    ),
    "interleaved": ("bias", Interleaved("b"), lambda t: torch.cat([t["b"][::2], t["b"][1::2]])),
    "interleaved, stacked and transposed": (
        "experts",
        Interleaved(Transposed("gu")),
        lambda t: torch.cat([t["gu"][..., ::2], t["gu"][..., 1::2]], dim=-1).mT,
    ),
    "one tensor per expert": (
        "experts",
        Fused("e.{}.g", "e.{}.u"),
        lambda t: torch.stack([torch.cat([t[f"e.{e}.g"], t[f"e.{e}.u"]]) for e in range(E)]),
    ),
    "pairs to halves": ("q", HALVES, lambda t: t["q"].view(G * R, K // 2, 2, D).transpose(1, 2).reshape(-1, D)),
    "grouped": ("qkv", grouped(), lambda t: ungrouped(t["fused"])),
    "crossed": ("down", CROSSED, lambda t: t["x"].view(3, 2, 2, 4).permute(1, 0, 3, 2).reshape(D, F)),
    "dealt": ("down", DEALT, lambda t: torch.stack([t[f"{('even', 'odd')[n % 2]}.{n}"] for n in range(D)])),
    "beside each other": ("up", BESIDE, lambda t: torch.cat([t["x"][..., 0], t["x"][..., 1]])),
    "reshaped": ("down", RESHAPED, lambda t: t["x"].permute(2, 1, 0).reshape(D, F)),
}


def reading(tensors: Mapping[str, Tensor]) -> Any:
    return lambda name, start, shape: tensors[name][box_of(start, shape)]


def box_of(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))


def sources_of(made: Conversion) -> dict[str, Tensor]:
    found, first = {}, 0
    for name in made.public:
        found[name] = numbers(made.shape(name), first)
        first += found[name].numel()
    return found


@pytest.mark.parametrize("case", CASES)
def test_any_box_of_ours_has_the_values_that_torch_operations_give_it(case: str) -> None:
    name, external, expected = CASES[case]
    made = conversion(name, external)
    sources = sources_of(made)
    whole = expected(sources)
    for rank in range(2):
        for box in placed(name).boxes(rank):
            found = torch.full(box.shape, -1.0, dtype=torch.float64)
            fill_ours(made.links[name], box.start, found, reading(sources))
            assert torch.equal(found, whole[box_of(box.start, box.shape)])
    ragged = torch.full((1,) * (whole.dim() - 1) + (whole.shape[-1] - 1,), -1.0, dtype=torch.float64)
    start = (*(size - 1 for size in whole.shape[:-1]), 1)
    fill_ours(made.links[name], start, ragged, reading(sources))
    assert torch.equal(ragged.flatten(), whole[tuple(size - 1 for size in whole.shape[:-1])][1:].flatten())


@pytest.mark.parametrize("case", CASES)
def test_the_inverse_gives_the_public_tensors_back(case: str) -> None:
    name, external, expected = CASES[case]
    made = conversion(name, external)
    sources = sources_of(made)
    ours = {name: expected(sources)}
    for tensor, original in sources.items():
        found = torch.full_like(original, -1.0)
        fill_theirs(made.public[tensor], found, reading(ours))
        assert torch.equal(found, original), tensor


# What is wrong is named.


def one_map(tensor: str, ours: tuple[Factor, ...], theirs: tuple[Factor, ...]) -> tuple[ExternalMap, ...]:
    """A map of dimensions with one factor each."""
    return (ExternalMap(tuple((one,) for one in ours), tensor, tuple((one,) for one in theirs)),)


def rows(tensor: str, first: int, size: int, place: int) -> ExternalMap:
    """Three rows of 'down' from row `first` on, which are those of a public tensor of `size` rows from `place` on."""
    return ExternalMap(((Factor("d", D, first, 3),), (LENGTH,)), tensor, ((Factor("d", size, place, 3),), (LENGTH,)))


SIMPLE = {"qkv": Fused("q", "k", "v"), "down": "d"}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a missing name": ({"qkv": Fused("q", "k", "v")}, "the external names lack 'down'; give it a public name, or None"),
    "a name of nothing": ({**SIMPLE, "up": "u"}, "no parameter or state matches 'up' of the external names"),
    "two patterns": ({**SIMPLE, "*": "x"}, r"patterns \S+ and \S+ both give '\w+' an external name"),
    "too few parts": ({**SIMPLE, "qkv": Fused("q", "k")}, "'qkv' has 3 segments and 2 external names"),
    "parts without segments": ({**SIMPLE, "down": Fused("q", "k")}, "must give several segments to exactly one"),
    "segments of different lengths": ({**SIMPLE, "qkv": Interleaved("q")}, "the segments of 'qkv' have different"),
    "a public tensor used twice": ({"qkv": Fused("q", "k", "v"), "down": "q"}, "give the public tensor 'q' the shapes"),
    "the same part twice": ({**SIMPLE, "qkv": Fused("q", "k", "k")}, r"qkv describe 96 elements of 'k', which has 48"),
    "a star too many": ({**SIMPLE, "down": "x.*.d"}, r"'x.\*.d' of 'down' has more stars than our pattern"),
    "a part of ours": (
        {**SIMPLE, "down": one_map("x", (Factor("d", D, 0, 3), LENGTH), (Factor("d", 3), LENGTH))},
        "the external names of 'down' describe 24 elements, but it has 48",
    ),
    "a part of ours twice": (
        {**SIMPLE, "down": (rows("x", 0, 3, 0), rows("y", 2, 3, 0))},
        "the external names of 'down' describe some of its elements twice, and others not at all",
    ),
    "a part of theirs twice": (
        {**SIMPLE, "down": (rows("x", 0, D, 0), rows("x", 3, D, 2))},
        "down describe some elements of 'x' twice, and others not at all",
    ),
    "another shape of ours": (
        {**SIMPLE, "down": one_map("x", (Factor("d", 3),), (Factor("d", 3),))},
        r"describes the shape \(3,\), but it has \(6, 8\)",
    ),
    "different counts": (
        {**SIMPLE, "down": one_map("x", (WIDTH, LENGTH), (WIDTH,))},
        "selects different numbers of indices of the factor 'f'",
    ),
    "braces without a factor": (
        {**SIMPLE, "down": one_map("x{e}", (WIDTH, LENGTH), (WIDTH, LENGTH))},
        "has the label 'e' in braces, which must be a factor of 'down'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_external_names_are_refused(case: str) -> None:
    names, reason = WRONG[case]
    with pytest.raises(ValueError, match=reason):
        conversion_of(ExternalNames(names), {name: placed(name) for name in ("qkv", "down")})


def test_a_factor_outside_of_its_size_is_refused() -> None:
    for wrong in ({"start": 8}, {"count": 0}, {"count": 5, "step": 2}, {"step": 0}):
        with pytest.raises(ValueError, match="outside of its size 8"):
            Factor("x", 8, **wrong)


def test_a_tied_parameter_has_one_public_tensor_and_duplicates() -> None:
    made = conversion_of(
        ExternalNames({"down": "table", "head": "lm_head"}, ignored=("mask.*",)),
        {"down": placed("down")},
        [("down", "head")],
    )
    assert list(made.public) == ["table"]
    assert list(made.duplicates) == ["lm_head"]
    assert made.shape("lm_head") == made.shape("table")
    assert made.ignores("lm_head", ())
    assert made.ignores("mask.3", ())
    assert made.ignores("mask.3.x", ())
    assert not made.ignores("mask", ())


@pytest.mark.parametrize(
    ("copies", "reason"),
    [
        ({"again": "up"}, "'again' is declared as a copy of 'up', which has no public tensor"),
        ({"table": "down"}, "'table' is a public tensor and a copy of one"),
    ],
)
def test_wrong_copies_are_refused(copies: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        conversion_of(ExternalNames({"down": "table"}, copies=copies), {"down": placed("down")})


def test_an_optional_module_is_ignored_where_its_tensor_is_present() -> None:
    names = ExternalNames({"down": "table"}, optional={"layers.4": "layers.4.merge"}, copies={"layers.4.table": "down"})
    made = conversion_of(names, {"down": placed("down")})
    assert made.ignores("layers.4.up", {"layers.4.merge"})
    assert not made.ignores("layers.4.up", {"layers.4.up"})
    assert not made.ignores("layers.5.up", {"layers.4.merge"})
    assert made.shape("layers.4.table") == placed("down").shape


def test_what_is_absent_has_no_links() -> None:
    made = conversion_of(ExternalNames({"down": None, "q": "q"}), {name: placed(name) for name in ("down", "q")})
    assert made.absent == {"down"}
    assert list(made.links) == ["q"]
