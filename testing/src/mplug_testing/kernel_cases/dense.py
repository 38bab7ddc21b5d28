"""Linear layers, norms, and the MLP with its activation. B batch, S sequence, D embed, I in, O out, F mlp, N tokens."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mplug.layout.plan import Init, Parameter
from mplug.model.slots.declaration import slot_of
from mplug_nn import MLP, Inputs, Linear, Norm, Prologue
from mplug_nn.activations import ACTIVATIONS, is_gated
from mplug_nn.norm_functions import NORMS
from mplug_nn.prologue import ACTIVATION_PRODUCT, FUSED_SLOTS, NORM_PRODUCT
from mplug_products.slot_buffers import hold
from mplug_testing.fused import FusedLinear
from mplug_testing.kernel_cases.case import BUFFERS, SINK, Case, Drawn, Suppliers, Tensors


def dense_cases() -> Iterator[Case]:
    """Cases of the slots of `Linear`, `Norm` and `MLP`."""
    yield from _linears()
    yield from _fused_norms()
    yield from _fused_activations()
    yield from _norms()
    yield from _activations()
    yield from _mlps()


def _linears() -> Iterator[Case]:
    yield _linear("activations [B, S, I]", (2, 16), 32, 48)
    yield _linear("rows [N, I]", (24,), 32, 48)
    yield _linear("batch 1 and length 1", (1, 1), 32, 48)
    yield _linear("odd widths", (2, 7), 19, 23)
    yield _linear("a gradient sink that holds something", (2, 16), 32, 48, sink=True)


def _linear(name: str, rows: tuple[int, ...], i: int, o: int, sink: bool = False) -> Case:
    drawn = Drawn(i + o)
    inputs = {"x": drawn.normal(*rows, i), "weight": drawn.normal(o, i)}
    if sink:
        inputs[SINK] = drawn.normal(o, i)

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        linear = with_weight(i, o, x["weight"], x.get(SINK))
        for slot in PLAIN_SLOTS:
            setattr(linear, slot.rpartition(".")[2], suppliers[slot])
        for slot, buffers in suppliers.get(BUFFERS, {}).items():
            hold(linear, slot_of(linear, slot), buffers)
        return lambda: {"output": linear(x["x"])}

    weight = Parameter(("mlp", "embed"), Init("normal"))
    return Case(PLAIN_SLOTS, name, Linear(i, o, bias=False), inputs, bind, parameters={"weight": weight})


PLAIN_SLOTS = tuple(slot.name for slot in Linear.SLOTS if not slot.fuses)
"""The slots that every linear layer has."""


def _fused_norms() -> Iterator[Case]:
    for kind in sorted(NORMS.plain):
        yield _fused(kind, NORM_PRODUCT, kind, (2, 16), 32, 48)
        yield _fused(f"{kind} with a residual and a bias", NORM_PRODUCT, kind, (2, 16), 32, 48, full=True)
        yield _fused(f"{kind} with an eps that counts", NORM_PRODUCT, kind, (24,), 32, 48, eps=1.0)
    yield _fused("odd widths", NORM_PRODUCT, "layernorm", (2, 7), 19, 23, full=True)
    yield _fused("batch 1 and length 1", NORM_PRODUCT, "rmsnorm", (1, 1), 32, 48)


def _fused_activations() -> Iterator[Case]:
    for kind in sorted(ACTIVATIONS.plain):
        yield _fused(kind, ACTIVATION_PRODUCT, kind, (2, 16), 32, 48)
        yield _fused(f"{kind} with a bias", ACTIVATION_PRODUCT, kind, (2, 16), 32, 48, full=True)
    yield _fused("odd widths", ACTIVATION_PRODUCT, "gelu", (2, 7), 19, 23, full=True)
    yield _fused("batch 1 and length 1", ACTIVATION_PRODUCT, "gelu_tanh", (1, 1), 32, 48)


def _fused(
    name: str, slot: str, kind: str, rows: tuple[int, ...], i: int, o: int, full: bool = False, eps: float = 1e-5
) -> Case:
    """A norm or an activation and the product of its result; `full`: with a bias and a residual."""
    drawn, is_norm = Drawn(i + o), slot == NORM_PRODUCT
    wide = 2 * i if slot == ACTIVATION_PRODUCT and is_gated(kind) else i
    inputs = {"x": 0.5 + 1.5 * drawn.normal(*rows, wide), "weight": drawn.normal(o, i)}
    if is_norm:
        inputs["norm weight"] = 1 + 0.2 * drawn.normal(i)
    if full:
        inputs["bias"] = drawn.normal(wide)
    if full and is_norm:
        inputs["residual"] = drawn.normal(*rows, i)

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        linear = with_weight(i, o, x["weight"], slot=slot)
        setattr(linear, slot.rpartition(".")[2], suppliers[slot])
        for held, buffers in suppliers.get(BUFFERS, {}).items():
            hold(linear, slot_of(linear, held), buffers)
        given = Inputs(x["x"], x.get("residual"), x.get("norm weight"), x.get("bias"))

        def call() -> dict[str, Tensor]:
            y, summed = linear.both(Prologue(kind, eps), given)
            return {"output": y} if summed is None else {"output": y, "sum": summed}

        return call

    weight = Parameter(("mlp", "embed"), Init("normal"))
    module = Linear(i, o, bias=False)
    return Case((slot,), name, module, inputs, bind, frozenset([kind]), parameters={"weight": weight})


def with_weight(i: int, o: int, weight: Tensor, sink: Tensor | None = None, slot: str = "", kind: str = "") -> Any:
    """A linear layer with a tensor in its weight's place, whose gradient goes to a sink if there is one.

    If `slot` is a fused slot, the layer's input is what the prologue reads, which is of a `kind`.
    """
    linear = FusedLinear(i, o, slot, kind) if slot in FUSED_SLOTS else Linear(i, o, bias=False)
    del linear.weight
    linear.weight = weight  # type: ignore[assignment]
    if sink is not None:
        weight.main_grad = sink  # type: ignore[attr-defined]
    return linear


def _norms() -> Iterator[Case]:
    for kind in NORMS.list.own:
        yield _norm(f"{kind} with a residual and a bias", kind, 24, residual=True, bias=True)
    for kind in sorted(NORMS.plain):
        yield _norm(kind, kind, 24)
        yield _norm(f"{kind} with a residual", kind, 24, residual=True)
        yield _norm(f"{kind} with a bias", kind, 24, bias=True)
        yield _norm(f"{kind} of an odd width", kind, 33, residual=True)
        yield _norm(f"{kind} with an eps that counts", kind, 24, eps=1.0)
        yield _norm(f"{kind} of batch 1 and length 1", kind, 24, rows=(1, 1), residual=True)


def _norm(
    name: str,
    kind: str,
    d: int,
    rows: tuple[int, ...] = (2, 16),
    residual: bool = False,
    bias: bool = False,
    eps: float = 1e-5,
) -> Case:
    drawn = Drawn(d)
    inputs = {"x": 0.5 + drawn.normal(*rows, d), "weight": 1 + 0.2 * drawn.normal(d)}
    if residual:
        inputs["residual"] = drawn.normal(*rows, d)
    if bias:
        inputs["bias"] = drawn.normal(d)

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        norm, residual, bias = suppliers["Norm.norm_residual"], x.get("residual"), x.get("bias")

        def call() -> dict[str, Tensor]:
            normed, summed = norm(x["x"], residual, x["weight"], bias, eps, kind)
            return {"normed sum": normed, "sum": summed}

        return call

    return Case(("Norm.norm_residual",), name, Norm(d, kind, eps, bias), inputs, bind, NORMS.needs(kind))


def _activations() -> Iterator[Case]:
    for kind in ACTIVATIONS.list.own:
        yield _activation(kind, kind, (2, 16), 24)
    for kind in sorted(ACTIVATIONS.plain):
        yield _activation(f"{kind} with a bias", kind, (2, 16), 24, bias=True)
        yield _activation(f"{kind} of an odd width", kind, (2, 7), 33, bias=True)
        yield _activation(f"{kind} of batch 1 and length 1", kind, (1, 1), 24)


def _activation(name: str, kind: str, rows: tuple[int, ...], f: int, bias: bool = False) -> Case:
    width, drawn = f * (2 if is_gated(kind) else 1), Drawn(f)
    inputs = {"x": 2 * drawn.normal(*rows, width)}
    if bias:
        inputs["bias"] = drawn.normal(width)

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        activate, bias = suppliers["MLP.activation"], x.get("bias")
        return lambda: {"output": activate(x["x"], bias, kind)}

    return Case(("MLP.activation",), name, MLP(16, f, kind, bias), inputs, bind, ACTIVATIONS.needs(kind))


def _mlps() -> Iterator[Case]:
    for kind in ACTIVATIONS.list.own:
        yield _mlp(kind, kind, (2, 16), 32, 64)
    for kind in sorted(ACTIVATIONS.plain):
        yield _mlp(f"{kind} with a bias", kind, (2, 16), 32, 64, bias=True)
    yield _mlp("several tiles", "gelu", (2, 131), 192, 320)
    yield _mlp("odd widths", "gelu", (2, 7), 19, 33)
    yield _mlp("batch 1 and length 1", "gelu", (1, 1), 32, 64)
    yield _mlp("a gradient sink that holds something", "gelu", (2, 16), 32, 64, sink=True)


def _mlp(name: str, kind: str, rows: tuple[int, ...], d: int, f: int, bias: bool = False, sink: bool = False) -> Case:
    wide, drawn = f * (2 if is_gated(kind) else 1), Drawn(d + f)
    inputs = {"x": drawn.normal(*rows, d), "up": d**-0.5 * drawn.normal(wide, d), "down": drawn.normal(d, f)}
    if bias:
        inputs["bias"] = drawn.normal(wide)
    if sink:
        inputs[SINK] = drawn.normal(wide, d)

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        mlp = MLP(d, f, kind, bias=False)
        mlp.up, mlp.down = with_weight(d, wide, x["up"], x.get(SINK)), with_weight(f, d, x["down"])
        mlp.up.bias, mlp.core = x.get("bias"), suppliers["MLP.core"]  # type: ignore[assignment]
        if sink:
            x["up"].main_grad_stale = torch.zeros((), dtype=torch.bool, device="cpu")  # type: ignore[attr-defined]
        return lambda: {"output": mlp(x["x"])}

    return Case(("MLP.core",), name, MLP(d, f, kind, bias), inputs, bind, ACTIVATIONS.needs(kind))
