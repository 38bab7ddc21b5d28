"""Which linears and experts get adapters: the words of `adapters.lora.targets`."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mplug import Segment, UsageError
from mplug_pretrained import Fused, Interleaved, Transposed

if TYPE_CHECKING:
    from mplug import Model

FIELD = "adapters.lora.targets"
Dim = str | Segment | tuple[Segment, ...]
"""The meaning of a dimension in a plan."""
WORDS = ("linear", "attention", "mlp", "experts")
STACKED: dict[str, set[tuple[str, ...]]] = {
    "up": {("gate_proj", "up_proj"), ("w1", "w3")},
    "down": {("down_proj",), ("w2",)},
}
"""By our parameter of experts, the tensors of an expert that the transformers library stacks, in this order."""


@dataclass(frozen=True)
class Pair:
    """A range of a linear's outputs that has an A and a B of its own: `rows` is its part of the dimension.

    `public` is the module of published checkpoints that computes it; None if there is none, or if the module orders its
    rows in another way. `transposed` says that the module stores its weight as [in, out]. `interleaved` says that the
    parameter of experts stores the rows of gate and up in turns.
    """

    rows: Dim
    length: int
    public: str | None = None
    transposed: bool = False
    interleaved: bool = False

    @property
    def leaf(self) -> str:
        """The last part of the public name: 'q_proj'."""
        return (self.public or "").rpartition(".")[2]


@dataclass(frozen=True)
class Target:
    """A linear, or a projection of experts, by name; its weight's name and shape; and the chosen pairs."""

    name: str
    weight: str
    shape: tuple[int, ...]
    dims: tuple[Dim, ...]
    pairs: tuple[Pair, ...]
    kinds: frozenset[str]
    chosen: tuple[int, ...] = ()

    @property
    def is_experts(self) -> bool:
        """Whether it is a projection of experts."""
        return "experts" in self.kinds


def chosen_targets(candidates: list[Target], words: Iterable[str]) -> list[Target]:
    """The candidates that the words name, with the chosen pairs.

    Raises UsageError if a word names nothing.
    """
    chosen: dict[str, set[int]] = {}
    for word in words:
        hits = [(target.name, number) for target in candidates for number in _named(word, target)]
        if not hits:
            known = dict.fromkeys(name for target in candidates for name in _short_names(target))
            raise UsageError(
                f"{FIELD}: '{word}' names no linear layer of this model; use a kind ({', '.join(WORDS)}), a pattern of "
                f"names as 'mplug explain' lists them, or one of {', '.join(known)}"
            )
        for name, number in hits:
            chosen.setdefault(name, set()).add(number)
    return [
        Target(one.name, one.weight, one.shape, one.dims, one.pairs, one.kinds, tuple(sorted(chosen[one.name])))
        for one in candidates
        if one.name in chosen
    ]


def _short_names(target: Target) -> list[str]:
    return [target.name.rpartition(".")[2], *(pair.leaf for pair in target.pairs if pair.leaf)]


def _named(word: str, target: Target) -> list[int]:
    """The pairs of a target that a word names."""
    everything = list(range(len(target.pairs)))
    if word in WORDS:
        return everything if word in target.kinds else []
    pattern = re.compile(
        r"\.".join("[^.]+" if part == "*" else re.escape(part) for part in word.split(".")) + r"(\..+)?"
    )
    if target.name.rpartition(".")[2] == word or pattern.fullmatch(target.name):
        return everything
    return [n for n in everything if word in (target.pairs[n].leaf,) or _matches(pattern, target.pairs[n])]


def _matches(pattern: "re.Pattern[str]", pair: Pair) -> bool:
    return pair.public is not None and pattern.fullmatch(pair.public) is not None


def candidates_of(model: "Model") -> list[Target]:
    """Every linear and every projection of experts in the numbered units of a model, in order."""
    return list(_candidates(model))


def _candidates(model: "Model") -> Iterator[Target]:
    from mplug_nn import MLP, DotProductAttention, Experts, Linear

    shapes = {name: tuple(one.shape) for name, one in model.parameters().items()}
    entries = model.plan.match(shapes)
    around: dict[str, str] = {}
    for name, part in model.module.named_modules():
        parent = around.get(name.rpartition(".")[0], "")
        kind = "attention" if isinstance(part, DotProductAttention) else "mlp" if isinstance(part, MLP) else parent
        around[name] = kind
        if not _in_row(name, model):
            continue
        if isinstance(part, Linear) and part.adaptable and f"{name}.weight" in entries:
            weight = f"{name}.weight"
            kinds = frozenset({"linear", kind} - {""})
            yield _target(model, name, weight, shapes[weight], entries[weight].dims, kinds)
        if isinstance(part, Experts):
            for own in ("up", "down"):
                weight = f"{name}.{own}"
                dims = entries[weight].dims
                external = model.plan.external.of(weight) if model.plan.external is not None else None
                interleaved = isinstance(external, Interleaved)
                pair = Pair(dims[1], shapes[weight][1], _public_experts(external, own), interleaved=interleaved)
                yield Target(weight, weight, shapes[weight], dims, (pair,), frozenset({"experts"}))


def _in_row(name: str, model: "Model") -> bool:
    """Whether a module lies in a unit of a row of numbered units (a block)."""
    return any(re.search(r"\.\d+$", unit.name) and name.startswith(f"{unit.name}.") for unit in model.plan.units)


def _target(
    model: "Model", name: str, weight: str, shape: tuple[int, ...], dims: tuple[Dim, ...], kinds: frozenset[str]
) -> Target:
    return Target(name, weight, shape, dims, _pairs(model, weight, shape[0], dims[0]), kinds)


def _pairs(model: "Model", weight: str, length: int, rows: Dim) -> tuple[Pair, ...]:
    """The pairs of a weight: one for each public module that has a part of it; without a public form, per segment.

    A public form with another number of parts is that of another MLP (with a gate, where this one has none).
    """
    external = model.plan.external.of(weight) if model.plan.external is not None else None
    segments = rows if isinstance(rows, tuple) else (rows,)
    if isinstance(external, Fused) and len(external.sources) == len(segments):
        named = zip(segments, external.sources, strict=True)
        return tuple(_public(segment, _length(segment, length), source) for segment, source in named)
    if isinstance(external, str | Transposed):
        return (_public(rows, length, external),)
    if external is not None or len(segments) == 1:
        return (Pair(rows, length),)
    return tuple(Pair(segment, _length(segment, length)) for segment in segments)


def _public_experts(external: Any, own: str) -> str | None:
    """The parameter of the transformers library with the stacked weights of experts; None for other folders.

    Folders have a tensor per expert ('...experts.3.gate_proj.weight'). The library stacks them, gate before up. It has
    the experts of Mixtral ('block_sparse_moe' in folders) in the module 'mlp'. Folders of gpt-oss have the parameter
    itself, transposed, with the rows of gate and up in turns.
    """
    stacked = "gate_up_proj" if own == "up" else "down_proj"
    whole = external.source if isinstance(external, Interleaved) and own == "up" else external
    if isinstance(whole, Transposed):
        return whole.tensor if whole.tensor.endswith(f".experts.{stacked}") else None
    sources = external.sources if isinstance(external, Fused) else (external,)
    pattern = r"(.+)\.experts\.\{\}\.(\w+)\.weight"
    hits = [re.fullmatch(pattern, source) if isinstance(source, str) else None for source in sources]
    leaves = tuple(hit[2] for hit in hits if hit)
    if len(leaves) != len(hits) or leaves not in STACKED[own] or hits[0] is None:
        return None
    return f"{hits[0][1].replace('.block_sparse_moe', '.mlp')}.experts.{stacked}"


def _public(rows: Dim, length: int, source: str | Transposed) -> Pair:
    tensor = source.tensor if isinstance(source, Transposed) else source
    return Pair(rows, length, tensor.removesuffix(".weight"), isinstance(source, Transposed))


def _length(segment: "str | Segment", whole: int) -> int:
    return whole if isinstance(segment, str) else segment.length
