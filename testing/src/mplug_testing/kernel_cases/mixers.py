"""Cases of scans and short convolutions.

B batch, S sequence, G key heads, H value heads, K key width, V value width, C channels, W width of a convolution.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mplug_nn import Convolution, Mamba2, MixerInputs, Scan, ScanSpec
from mplug_nn.mixers.specification import CHANNEL_DECAY, CHANNEL_DELTA, DECAY, DELTA
from mplug_testing.kernel_cases.case import Case, Drawn, Suppliers, Tensors

KINDS = (DECAY, CHANNEL_DECAY, DELTA, CHANNEL_DELTA)
DOCUMENTS = ((5, 1, 7, 0), (13, 0, 0, 0))
"""Document lengths of two samples of 13 positions, padded with zeros."""
LONG_DOCUMENTS = ((1, 63, 64, 3), (100, 31, 0, 0))
"""Of two samples of 131 positions: documents begin where a chunk of 64 does, and inside of one."""


def mixer_cases() -> Iterator[Case]:
    """Cases of `Scan.core`, `Convolution.core` and `Mamba2.squares`."""
    for kind in KINDS:
        yield from _scans(kind)
    yield from _convolutions()
    squares = {"squares": Drawn(0).integers(9, 2, 5, 2, 1)}
    yield Case(("Mamba2.squares",), "sums of squares [B, S, G, 1]", Mamba2(32, 4, 16, 2, 8), squares, _squares)


def _scans(kind: Any) -> Iterator[Case]:
    yield _scan(kind, "", 2, 5, 2, 2)
    yield _scan(kind, "grouped keys of 24 and values of 32", 2, 13, 2, 4, widths=(24, 32))
    yield _scan(kind, "decays that leave nothing", 1, 70, 1, 2, decays=30.0)
    yield _scan(kind, "documents", 2, 13, 1, 2, documents=DOCUMENTS)
    yield _scan(kind, "documents over several chunks", 2, 131, 1, 2, documents=LONG_DOCUMENTS)
    yield _scan(kind, "states and a length of several chunks", 1, 131, 1, 2, states=True)
    yield _scan(kind, "states of one position", 2, 1, 1, 2, states=True)
    yield _scan(kind, "documents and states", 2, 13, 1, 2, documents=DOCUMENTS, states=True)
    if kind in (DELTA, CHANNEL_DELTA):
        yield _scan(kind, "write strengths up to 2", 2, 16, 1, 2, strongest=2.0)


def _scan(
    kind: Any,
    name: str,
    b: int,
    s: int,
    g: int,
    h: int,
    widths: tuple[int, int] = (16, 16),
    decays: float = 0.2,
    strongest: float = 1.0,
    documents: tuple[tuple[int, ...], ...] = (),
    states: bool = False,
) -> Case:
    k, v = widths
    module, drawn = Scan(kind, h, g, k, v, k**-0.5), Drawn(s + h + k)
    module.spec = replace(module.spec, documents=bool(documents), states=states)
    spec = module.spec
    inputs = {
        "q": drawn.normal(b, s, g, k),
        "k": drawn.normal(b, s, g, k) * k**-0.5,
        "v": drawn.normal(b, s, h, v),
        "gate": decays * drawn.normal(b, s, h, *((k,) if spec.by_channel else ())),
    }
    if spec.corrects:
        inputs["strength"] = drawn.normal(b, s, h)
    if documents:
        inputs["document_lengths"] = torch.tensor(documents, device="cpu")
    if states:
        inputs["state"] = drawn.normal(b, h, k, v)
    return Case(("Scan.core",), _joined(kind, name), module, inputs, _binding(spec, strongest), spec.needs)


def _binding(spec: ScanSpec, strongest: float) -> Callable[[Suppliers, Tensors], Callable[[], dict[str, Tensor]]]:
    """The call of a scan. Decays and write strengths are computed from the inputs in at least fp32, as mixers do."""

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        core, wide = suppliers["Scan.core"], torch.promote_types(x["v"].dtype, torch.float32)
        given = MixerInputs(x.get("document_lengths"), x.get("state"))

        def call() -> dict[str, Tensor]:
            decay = -x["gate"].to(wide).abs()
            write = strongest * x["strength"].to(wide).sigmoid() if "strength" in x else None
            y, end = core(x["q"], x["k"], x["v"], decay, write, spec, given)
            return {"output": y, "end state": end.to(y.dtype)} if spec.states else {"output": y}

        return call

    return bind


def _convolutions() -> Iterator[Case]:
    yield _convolution("width 4 and SiLU", 2, 16, 4)
    yield _convolution("no activation", 2, 16, 4, silu=False)
    yield _convolution("a bias", 2, 16, 4, bias=True)
    yield _convolution("width 2", 2, 16, 2)
    yield _convolution("a length of several blocks", 1, 131, 4, bias=True)
    yield _convolution("fewer positions than the width", 2, 2, 4)
    yield _convolution("documents", 2, 13, 4, documents=DOCUMENTS)
    yield _convolution("documents over several blocks", 2, 131, 4, bias=True, documents=LONG_DOCUMENTS)
    yield _convolution("states", 2, 13, 4, bias=True, states=True)
    yield _convolution("states of one position", 2, 1, 4, states=True)
    yield _convolution("documents and states", 2, 13, 4, documents=DOCUMENTS, states=True)


def _convolution(
    name: str,
    b: int,
    s: int,
    w: int,
    bias: bool = False,
    silu: bool = True,
    documents: tuple[tuple[int, ...], ...] = (),
    states: bool = False,
) -> Case:
    c, drawn = 32, Drawn(s + w)
    module = Convolution(c, w, bias=bias, silu=silu)
    module.spec = spec = replace(module.spec, documents=bool(documents), states=states)
    inputs = {"x": drawn.normal(b, s, c), "weight": drawn.normal(c, w)}
    if bias:
        inputs["bias"] = drawn.normal(c)
    if documents:
        inputs["document_lengths"] = torch.tensor(documents, device="cpu")
    if states:
        inputs["state"] = drawn.normal(b, w - 1, c)

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        core, given = suppliers["Convolution.core"], MixerInputs(x.get("document_lengths"), x.get("state"))

        def call() -> dict[str, Tensor]:
            y, end = core(x["x"], x["weight"], x.get("bias"), spec, given)
            return {"output": y, "end state": end} if spec.states else {"output": y}

        return call

    return Case(("Convolution.core",), name, module, inputs, bind, spec.needs)


def _joined(kind: str, name: str) -> str:
    return f"kind '{kind}'{', ' if name else ''}{name}"


def _squares(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"the only rank's sums": suppliers["Mamba2.squares"](x["squares"], 2)}
