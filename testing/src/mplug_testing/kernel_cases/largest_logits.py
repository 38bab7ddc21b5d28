"""Cases of the largest attention logits: the statistic itself, and the keys of whole sequences.

B batch, S queries of a rank, T keys, H query heads, G KV heads, K width of a key.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mplug_nn import AttentionInputs, AttentionSpec, LargestLogits
from mplug_nn.largest_logits import Intervals
from mplug_testing.kernel_cases.case import Case, Drawn, Suppliers, Tensors

GROUPS_OF_13 = ((-1, 0, 0, 0, -1, 1, -1, 2, 2, 2, 2, 2, -1), (0, 0, 0, 1, 1, 1, 1, 1, 1, -1, -1, -1, 2))
"""Groups of positions in two samples."""
DOCUMENTS_OF_13 = ((5, 1, 7, 0), (13, 0, 0, 0))
"""Document lengths of two samples, padded with zeros."""
ALL: dict[str, Any] = {"position_groups": True, "window": 3, "documents": True}
TWO: Intervals = ((2, 5), (9, 12))
"""Positions of a rank that has two parts of each sequence."""


def largest_logits_cases() -> Iterator[Case]:
    """Cases of `LargestLogits.maximum` and `LargestLogits.whole_keys`."""
    yield _maximum("as many KV heads as query heads", 4, 4, 8)
    yield _maximum("grouped KV heads", 6, 2, 8)
    yield _maximum("heads of 24", 4, 2, 24)
    yield _maximum("negative logits", 4, 2, 8, negative=True)
    yield _maximum("negative logits of several blocks", 2, 1, 8, length=131, negative=True)
    yield _maximum("no causal mask", 4, 2, 8, causal=False)
    yield _maximum("a window", 4, 2, 8, window=4)
    yield _maximum("a window and no causal mask", 4, 2, 8, window=4, causal=False)
    yield _maximum("a window of one position", 4, 2, 8, window=1)
    yield _maximum("documents", 4, 2, 8, documents=True)
    yield _maximum("documents and no causal mask", 4, 2, 8, documents=True, causal=False)
    yield _maximum("groups of positions", 4, 2, 8, position_groups=True)
    yield _maximum("groups of positions, a window and documents", 4, 2, 8, **ALL)
    yield _maximum("two intervals of positions", 4, 2, 8, TWO)
    yield _maximum("two intervals of positions and no causal mask", 4, 2, 8, TWO, causal=False, window=4)
    yield _maximum("two intervals of positions, a window and documents", 4, 2, 8, TWO, documents=True, window=3)
    yield _maximum("two intervals of positions, groups, a window and documents", 4, 2, 8, TWO, **ALL)
    spec, drawn = AttentionSpec(1.0, 8, 8), Drawn(0)
    tensors = {"queries": drawn.normal(2, 5, 4, 8), "keys": drawn.normal(2, 5, 2, 8)}
    name = "queries [B, S, H, K] and keys [B, S, G, K]"
    yield Case(("LargestLogits.whole_keys",), name, LargestLogits(4, spec), tensors, _whole_keys)


def _maximum(
    name: str,
    h: int,
    g: int,
    k: int,
    intervals: Intervals | None = None,
    length: int = 13,
    negative: bool = False,
    **asked: Any,
) -> Case:
    spec, drawn, intervals = AttentionSpec(0.3, k, k, **asked), Drawn(h + g + k), intervals or ((0, length),)
    inputs = {"q": drawn.normal(2, sum(end - first for first, end in intervals), h, k)}
    inputs["k"] = drawn.normal(2, length, g, k)
    if negative:  # zeros of a tile that is not full would be larger
        inputs = {"q": -1 - inputs["q"].abs(), "k": 1 + inputs["k"].abs()}
    if spec.documents:
        inputs["document_lengths"] = torch.tensor(DOCUMENTS_OF_13, device="cpu")
    if spec.position_groups:
        inputs["position_groups"] = torch.tensor(GROUPS_OF_13, device="cpu")

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        maximum = suppliers["LargestLogits.maximum"]
        given = AttentionInputs(
            document_lengths=x.get("document_lengths"), position_groups=x.get("position_groups"), num_heads=h
        )

        def call() -> dict[str, Tensor]:
            q, k = x["q"].detach(), x["k"].detach()
            largest = torch.full((h,), float("-inf"), dtype=torch.float64, device=q.device)
            largest[-1] = 6.0  # of an earlier micro batch
            maximum(largest, q, k, intervals, spec, given)
            return {"largest logit": largest.to(torch.promote_types(q.dtype, torch.float32))}

        return call

    return Case(("LargestLogits.maximum",), name, LargestLogits(h, spec), inputs, bind, spec.needs)


def _whole_keys(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
    def call() -> dict[str, Tensor]:
        queries, keys, intervals = suppliers["LargestLogits.whole_keys"](x["queries"], x["keys"], None)
        places = torch.cat([torch.arange(*interval, device=x["keys"].device) for interval in intervals])
        return {"the only rank's queries": queries, "its keys": keys, "positions": places}

    return call
