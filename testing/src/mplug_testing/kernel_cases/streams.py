"""The ends of a stream beside the tokens: the rows that are embedded, and the join. P patches, R rows, E embed."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from mplug_nn import CrossAttention, PatchEmbedding, StreamJoin
from mplug_testing.kernel_cases.case import Case, Drawn, Suppliers, Tensors


def stream_cases() -> Iterator[Case]:
    """Cases of `Patches.rows`, `Join.gather`, `Join.positions`, `Join.bring_back` and `CrossAttention.gather`."""
    drawn, embedding, join = Drawn(3), PatchEmbedding(12, 8, bias=True), StreamJoin()
    yield _case("Patches.rows", "patches [1, P, C]", embedding, drawn.normal(1, 16, 12))
    yield _case("Patches.rows", "places [1, P, 4]", embedding, drawn.integers(9, 1, 16, 4))
    yield _case("Join.gather", "rows [1, R, E]", join, drawn.normal(1, 6, 24))
    yield _case("Join.gather", "one row", join, drawn.normal(1, 1, 24))
    yield _case("Join.positions", "places [B, S]", join, drawn.integers(7, 2, 16) - 1)
    cross = CrossAttention(16, 2, 8, typical_keys=6)
    yield _case("CrossAttention.gather", "rows [1, R, 2 H K]", cross, drawn.normal(1, 6, 32))
    yield _case("Join.bring_back", "rows that are computed here", join, drawn.normal(6, 24), {})


def _case(slot: str, name: str, module: nn.Module, x: Tensor, *further: Any) -> Case:
    def bind(suppliers: Suppliers, given: Tensors) -> Callable[[], dict[str, Tensor]]:
        return lambda: {"output": suppliers[slot](given["x"], *further)}

    return Case((slot,), name, module, {"x": x}, bind)
