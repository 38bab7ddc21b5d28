"""External names: each form of a map, against torch operations that say the same; every way in which they are wrong."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from mplug import (
    Axis,
    ExternalMap,
    ExternalNames,
    Factor,
    Fused,
    Init,
    Interleaved,
    Mesh,
    Parameter,
    Placement,
    Segment,
    Transposed,
)
from mplug.checkpoint.transfer import fill_ours, fill_theirs
from mplug.layout.conversion import Conversion, conversion_of

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


# Rotated pairs: theirs has the two numbers of a pair side by side, ours in two halves.
HALVES = (
    ExternalMap(
        ((Factor("h", G * R), Factor("half", 2), Factor("pair", K // 2)), (Factor("d", D),)),
        "q",
        ((Factor("h", G * R), Factor("pair", K // 2), Factor("half", 2)), (Factor("d", D),)),
    ),
)


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
    "fused and transposed": ("up", Fused(Transposed("g"), Transposed("u")), lambda t: torch.cat([t["g"].t(), t["u"].t()])),
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
    "reshaped": (
        "down",
        (ExternalMap(((Factor("d", D),), (Factor("a", 2), Factor("b", F // 2))), "x", ((Factor("b", F // 2),), (Factor("a", 2),), (Factor("d", D),))),),
        lambda t: t["x"].permute(2, 1, 0).reshape(D, F),
    ),
}  # fmt: skip


class Counting:
    """The source tensors, with the boxes that are read."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self.read = tensors, list[tuple[str, int]]()

    def __call__(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        self.read.append((name, torch.Size(shape).numel()))
        return self.tensors[name][tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]


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
            fill_ours(made.links[name], box.start, found, Counting(sources))
            assert torch.equal(found, whole[tuple(slice(s, s + n) for s, n in zip(box.start, box.shape, strict=True))])
    ragged = torch.full((1,) * (whole.dim() - 1) + (whole.shape[-1] - 1,), -1.0, dtype=torch.float64)
    start = (*(size - 1 for size in whole.shape[:-1]), 1)
    fill_ours(made.links[name], start, ragged, Counting(sources))
    assert torch.equal(ragged.flatten(), whole[tuple(size - 1 for size in whole.shape[:-1])][1:].flatten())


@pytest.mark.parametrize("case", CASES)
def test_the_inverse_gives_the_public_tensors_back(case: str) -> None:
    name, external, expected = CASES[case]
    made = conversion(name, external)
    sources = sources_of(made)
    ours = {name: expected(sources)}
    for tensor, original in sources.items():
        found = torch.full_like(original, -1.0)
        fill_theirs(made.public[tensor], found, Counting(ours))
        assert torch.equal(found, original), tensor
