"""The calls by which a kernel is judged: for every slot a grid that goes from the plain case to the special ones.

Each case differs from the first of its slot in what its name says, so the case that fails names what is wrong.

B batch, S sequence, D embed, H query heads, G KV heads, K head dim, I in, O out, F mlp, V vocabulary,
N tokens, E experts.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

from mplug.nn import MLP, Attention, Choice, Dropout, Embedding, Experts, Linear, Loss, Norm, Router, Weights
from mplug.nn.attention import prepare_qk
from mplug.nn.linear import PLAIN, multiply
from mplug.nn.loss import IGNORED
from mplug.nn.mlp import Kind as Activation
from mplug.nn.mlp import activation
from mplug.nn.norm import Kind

Suppliers = Mapping[str, Callable[..., Any]]
Tensors = Mapping[str, Tensor]

SINK = "main_grad"
"""The input that is a gradient sink's buffer: in fp32 at least, and the one that a supplier changes."""


@dataclass(frozen=True)
class Case:
    """One call of a slot.

    `module` is the module of the site, on the meta device. `inputs` are integers, and fp64 numbers that are rounded to
    the type that is tried. `bind(suppliers, inputs)` returns the call: a function that gives outputs by name.
    """

    slots: tuple[str, ...]
    name: str
    module: nn.Module
    inputs: Tensors
    bind: Callable[[Suppliers, Tensors], Callable[[], dict[str, Tensor]]]

    @property
    def plain(self) -> Suppliers:
        """What `mplug.nn` has in the slots."""
        return {slot: getattr(self.module, slot.rpartition(".")[2]) for slot in self.slots}

    @property
    def dropout(self) -> float:
        """The probability with which attention weights are dropped."""
        return float(self.module.dropout) if isinstance(self.module, Attention) else 0.0


def cases() -> list[Case]:
    """The whole grid."""
    with torch.device("meta"):
        return list(_all())


def _all() -> Iterator[Case]:
    yield from _attention_cores()
    yield from _prepared_qk()
    yield from _prepared_qkv()
    yield from _linears()
    yield from _norms()
    yield from _activations()
    yield from _mlps()
    yield from _lookups()
    yield from _rows()
    yield from _losses()
    yield from _routes()
    yield from _experts()
    yield Case(("Router.summed",), "counts [E]", Router(8, Choice(4, 2)), {"counts": _Drawn(0).integers(9, 4)}, _sum)


class _Drawn:
    """Numbers for inputs, the same for every run of a case."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self._generator, device="cpu")

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self._generator, device="cpu")


# Attention.


def _attention_cores() -> Iterator[Case]:
    yield _core("as many KV heads as query heads", 2, 16, 4, 4, 8)
    yield _core("a scale that is not 1/sqrt(head dim)", 2, 16, 4, 4, 8, scale=0.9)
    yield _core("grouped KV heads", 2, 16, 6, 2, 8)
    yield _core("one KV head", 2, 16, 4, 1, 8)
    yield _core("an odd length", 2, 33, 2, 2, 8)
    yield _core("a length of several blocks", 1, 131, 2, 1, 8)
    yield _core("batch 1 and length 1", 1, 1, 2, 2, 8)
    yield _core("heads of 64", 1, 20, 2, 2, 64)
    yield _core("heads of 24", 1, 20, 2, 2, 24)
    yield _core("scores whose exponentials overflow", 2, 16, 2, 2, 8, scale=1.0, offset=16.0)
    yield _core("scores whose exponentials vanish", 2, 16, 2, 2, 8, scale=1.0, offset=-16.0)
    yield _core("first_head and no dropout", 2, 16, 4, 4, 8, first_head=4)
    yield _core("dropout by the samples' keys", 2, 16, 4, 2, 8, dropout=0.25)
    yield _core("dropout with heads numbered from first_head", 2, 16, 4, 2, 8, dropout=0.25, first_head=4)


def _core(
    name: str,
    b: int,
    s: int,
    h: int,
    g: int,
    k: int,
    scale: float | None = None,
    dropout: float = 0.0,
    offset: float = 0.0,
    **named: Any,
) -> Case:
    drawn = _Drawn(s + h + g + k)
    inputs = {"q": drawn.normal(b, s, h, k), "k": drawn.normal(b, s, g, k), "v": drawn.normal(b, s, g, k)}
    if offset:  # every score is about `offset` K, and their differences are small
        inputs |= {"q": 1 + 0.1 * inputs["q"], "k": offset + 0.3 * inputs["k"]}
    if dropout:
        inputs["keys"] = drawn.integers(1 << 60, b)
    named |= {"scale": k**-0.5 if scale is None else scale, "dropout": dropout}

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        core = suppliers["Attention.core"]
        return lambda: {"output": core(x["q"], x["k"], x["v"], keys=x.get("keys"), **named)}

    module = Attention(h * k, h, g, k, bias=False, qk_norm=False, theta=None, dropout=dropout)
    return Case(("Attention.core",), name, module, inputs, bind)


def _prepared_qk() -> Iterator[Case]:
    yield _qk("rotary positions", 2, 16, 4, 4, theta=10000.0)
    yield _qk("QK-norm", 2, 16, 4, 4, norm=True)
    yield _qk("QK-norm, then rotary positions", 2, 16, 4, 4, theta=10000.0, norm=True)
    yield _qk("grouped KV heads", 2, 16, 6, 2, theta=10000.0, norm=True)
    yield _qk("an eps that counts", 2, 16, 4, 4, norm=True, eps=1.0)
    yield _qk("another base of the frequencies", 2, 16, 4, 4, theta=500.0)
    yield _qk("positions of each sample", 2, 33, 4, 2, theta=10000.0, each=True)
    yield _qk("far positions", 1, 16, 4, 2, theta=10000.0, first=4000)
    yield _qk("neither norm nor positions", 2, 16, 4, 4)
    yield _qk("batch 1 and length 1", 1, 1, 2, 2, theta=10000.0, norm=True, first=3)


def _qk(
    name: str,
    b: int,
    s: int,
    h: int,
    g: int,
    theta: float | None = None,
    norm: bool = False,
    eps: float = 1e-5,
    each: bool = False,
    first: int = 0,
) -> Case:
    k, drawn = 8, _Drawn(s + h + g)
    inputs = {"q": drawn.normal(b, s, h, k), "k": drawn.normal(b, s, g, k)}
    inputs |= _how_prepared(drawn, b, s, k, norm, each, first)

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        prepare, weights = suppliers["Attention.prepare_qk"], (x.get("q_weight"), x.get("k_weight"))

        def call() -> dict[str, Tensor]:
            q, k = prepare(x["q"], x["k"], x["positions"], *weights, eps, theta)
            return {"prepared q": q, "prepared k": k}

        return call

    module = Attention(h * k, h, g, k, bias=False, qk_norm=norm, theta=theta, eps=eps)
    return Case(("Attention.prepare_qk",), name, module, inputs, bind)


def _how_prepared(drawn: _Drawn, b: int, s: int, k: int, norm: bool, each: bool, first: int) -> dict[str, Tensor]:
    """Positions [1, S] (`each`: [B, S]), and the weights [K] of QK-norm."""
    positions = torch.arange(first, first + s, device="cpu")[None]
    inputs = {"positions": positions + 7 * torch.arange(b, device="cpu")[:, None] if each else positions}
    if norm:
        inputs |= {"q_weight": 1 + 0.2 * drawn.normal(k), "k_weight": 1 + 0.2 * drawn.normal(k)}
    return inputs


def _prepared_qkv() -> Iterator[Case]:
    yield _qkv("rotary positions", 2, 6, 4, 4, 8, theta=10000.0)
    yield _qkv("QK-norm", 2, 6, 4, 4, 8, norm=True)
    yield _qkv("QK-norm, then rotary positions", 2, 6, 4, 4, 8, theta=10000.0, norm=True)
    yield _qkv("neither norm nor positions", 2, 6, 4, 4, 8)
    yield _qkv("grouped KV heads", 2, 6, 6, 2, 8, theta=10000.0)
    yield _qkv("grouped KV heads and QK-norm", 2, 6, 6, 2, 8, theta=10000.0, norm=True)
    yield _qkv("one KV head", 2, 6, 4, 1, 8, theta=10000.0, norm=True)
    yield _qkv("an eps that counts", 2, 6, 4, 4, 8, norm=True, eps=1.0)
    yield _qkv("another base of the frequencies", 2, 6, 4, 4, 8, theta=500.0)
    yield _qkv("positions of each sample", 2, 7, 4, 2, 8, theta=10000.0, each=True)
    yield _qkv("far positions", 1, 6, 4, 2, 8, theta=10000.0, first=4000)
    yield _qkv("batch 1 and length 1", 1, 1, 2, 2, 8, theta=10000.0, norm=True, first=3)
    yield _qkv("heads of 64", 2, 5, 3, 3, 64, theta=10000.0, norm=True)
    yield _qkv("heads of 24", 2, 5, 4, 2, 24, theta=10000.0, norm=True)


def _qkv(
    name: str,
    b: int,
    s: int,
    h: int,
    g: int,
    k: int,
    theta: float | None = None,
    norm: bool = False,
    eps: float = 1e-5,
    each: bool = False,
    first: int = 0,
) -> Case:
    drawn = _Drawn(s + h + g + k)
    inputs = {"packed heads": drawn.normal(b, s, h + 2 * g, k), **_how_prepared(drawn, b, s, k, norm, each, first)}

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        prepare, weights = suppliers["Attention.prepare_qkv"], (x.get("q_weight"), x.get("k_weight"))

        def call() -> dict[str, Tensor]:
            q, k, v = prepare(x["packed heads"], h, g, x["positions"], *weights, eps, theta, prepare_qk)
            return {"prepared q": q, "prepared k": k, "v": v}

        return call

    module = Attention(h * k, h, g, k, bias=False, qk_norm=norm, theta=theta, eps=eps)
    return Case(("Attention.prepare_qkv",), name, module, inputs, bind)


# Linear, norm, activation.


def _linears() -> Iterator[Case]:
    yield _linear("activations [B, S, I]", (2, 16), 32, 48)
    yield _linear("rows [N, I]", (24,), 32, 48)
    yield _linear("batch 1 and length 1", (1, 1), 32, 48)
    yield _linear("odd widths", (2, 7), 19, 23)
    yield _linear("a gradient sink that holds something", (2, 16), 32, 48, sink=True)


def _linear(name: str, rows: tuple[int, ...], i: int, o: int, sink: bool = False) -> Case:
    drawn = _Drawn(i + o)
    inputs = {"x": drawn.normal(*rows, i), "weight": drawn.normal(o, i)}
    if sink:
        inputs[SINK] = drawn.normal(o, i)

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        linear = _with_weight(i, o, x["weight"], x.get(SINK))
        linear.gemm, linear.gather = suppliers["Linear.gemm"], suppliers["Linear.gather"]
        linear.scatter = suppliers["Linear.scatter"]
        return lambda: {"output": linear.product(x["x"])}

    return Case(("Linear.gemm", "Linear.gather", "Linear.scatter"), name, Linear(i, o, bias=False), inputs, bind)


def _with_weight(i: int, o: int, weight: Tensor, sink: Tensor | None = None) -> Any:
    """A linear layer with a tensor in its weight's place, whose gradient goes to a sink if there is one."""
    linear = Linear(i, o, bias=False)
    del linear.weight
    linear.weight = weight  # type: ignore[assignment]
    if sink is not None:
        weight.main_grad = sink  # type: ignore[attr-defined]
    return linear


def _norms() -> Iterator[Case]:
    for kind in get_args(Kind):
        yield _norm(kind, kind, 24)
        yield _norm(f"{kind} with a residual", kind, 24, residual=True)
        yield _norm(f"{kind} with a bias", kind, 24, bias=True)
        yield _norm(f"{kind} with a residual and a bias", kind, 24, residual=True, bias=True)
        yield _norm(f"{kind} of an odd width", kind, 33, residual=True)
        yield _norm(f"{kind} with an eps that counts", kind, 24, eps=1.0)
        yield _norm(f"{kind} of batch 1 and length 1", kind, 24, rows=(1, 1), residual=True)


def _norm(
    name: str,
    kind: Kind,
    d: int,
    rows: tuple[int, ...] = (2, 16),
    residual: bool = False,
    bias: bool = False,
    eps: float = 1e-5,
) -> Case:
    drawn = _Drawn(d)
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

    return Case(("Norm.norm_residual",), name, Norm(d, kind, eps, bias), inputs, bind)


def _activations() -> Iterator[Case]:
    for kind in get_args(Activation):
        yield _activation(kind, kind, (2, 16), 24)
        yield _activation(f"{kind} with a bias", kind, (2, 16), 24, bias=True)
        yield _activation(f"{kind} of an odd width", kind, (2, 7), 33, bias=True)
        yield _activation(f"{kind} of batch 1 and length 1", kind, (1, 1), 24)


def _activation(name: str, kind: Activation, rows: tuple[int, ...], f: int, bias: bool = False) -> Case:
    width, drawn = f * (2 if kind == "swiglu" else 1), _Drawn(f)
    inputs = {"x": 2 * drawn.normal(*rows, width)}
    if bias:
        inputs["bias"] = drawn.normal(width)

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        activate, bias = suppliers["MLP.activation"], x.get("bias")
        return lambda: {"output": activate(x["x"], bias, kind)}

    return Case(("MLP.activation",), name, MLP(16, f, kind, bias), inputs, bind)


def _mlps() -> Iterator[Case]:
    for kind in get_args(Activation):
        yield _mlp(kind, kind, (2, 16), 32, 64)
        yield _mlp(f"{kind} with a bias", kind, (2, 16), 32, 64, bias=True)
    yield _mlp("several tiles", "gelu", (2, 131), 192, 320)
    yield _mlp("odd widths", "gelu", (2, 7), 19, 33)
    yield _mlp("batch 1 and length 1", "gelu", (1, 1), 32, 64)
    yield _mlp("a gradient sink that holds something", "gelu", (2, 16), 32, 64, sink=True)


def _mlp(
    name: str, kind: Activation, rows: tuple[int, ...], d: int, f: int, bias: bool = False, sink: bool = False
) -> Case:
    wide, drawn = f * (2 if kind == "swiglu" else 1), _Drawn(d + f)
    inputs = {"x": drawn.normal(*rows, d), "up": d**-0.5 * drawn.normal(wide, d), "down": drawn.normal(d, f)}
    if bias:
        inputs["bias"] = drawn.normal(wide)
    if sink:
        inputs[SINK] = drawn.normal(wide, d)

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        stale = torch.zeros((), dtype=torch.bool, device="cpu") if sink else None
        up, bias, down = Weights(x["up"], x.get(SINK), stale), x.get("bias"), Weights(x["down"])

        def composed(x: Tensor) -> Tensor:
            return multiply(activation(multiply(x, up, PLAIN), bias, kind), down, PLAIN)

        return lambda: {"output": suppliers["MLP.core"](x["x"], up, bias, down, kind, composed)}

    return Case(("MLP.core",), name, MLP(d, f, kind, bias), inputs, bind)


# Embedding, dropout, loss.


def _lookups() -> Iterator[Case]:
    yield _lookup("tokens, some of them several times", (2, 16), 11)
    yield _lookup("positions [1, S]", (1, 16), 40)
    yield _lookup("batch 1 and length 1", (1, 1), 11)


def _lookup(name: str, rows: tuple[int, ...], v: int) -> Case:
    drawn = _Drawn(v)
    inputs = {"indices": drawn.integers(v, *rows), "weight": drawn.normal(v, 24)}

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        look_up = suppliers["Embedding.lookup"]
        return lambda: {"output": look_up(x["indices"], x["weight"])}

    return Case(("Embedding.lookup",), name, Embedding(v, 24), inputs, bind)


def _rows() -> Iterator[Case]:
    for name, shape in (("positions [1, S]", (1, 16)), ("positions [B, S]", (2, 16)), ("length 1", (1, 1))):
        positions = _Drawn(0).integers(1000, *shape)

        def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
            return lambda: {"numbering of rows": suppliers["Dropout.rows"](x["positions"])}

        yield Case(("Dropout.rows",), name, Dropout(0.1), {"positions": positions}, bind)


def _losses() -> Iterator[Case]:
    yield _loss("every label a target", (2, 16), 40)
    yield _loss("ignored labels", (2, 16), 40, ignored=11)
    yield _loss("no target at all", (1, 8), 40, ignored=8)
    yield _loss("an odd vocabulary and length", (2, 33), 37, ignored=5)
    yield _loss("batch 1 and length 1", (1, 1), 40)


def _loss(name: str, rows: tuple[int, int], v: int, ignored: int = 0) -> Case:
    d, drawn = 24, _Drawn(v + rows[1])
    labels = drawn.integers(v, *rows)
    labels.flatten()[:ignored] = IGNORED  # a view: the labels are contiguous
    inputs = {"hidden": drawn.normal(*rows, d), "weight": drawn.normal(v, d), "labels": labels}

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        project, loss = _with_weight(d, v, x["weight"]), suppliers["Loss.cross_entropy"]

        def call() -> dict[str, Tensor]:
            total, count = loss(x["hidden"], project, x["labels"])
            return {"loss": total, "number of targets": count}

        return call

    return Case(("Loss.cross_entropy",), name, Loss(), inputs, bind)


# Experts.


def _routes() -> Iterator[Case]:
    yield _route("each expert chosen", 16, 4, 2)
    yield _route("one choice a token", 16, 4, 1)
    yield _route("experts that nobody chooses", 16, 9, 2, below=3)
    yield _route("one expert that gets all", 16, 4, 1, below=1)
    yield _route("choices that were dropped", 16, 4, 2, dropped=9)
    yield _route("one token", 1, 4, 2)


def _route(name: str, n: int, e: int, k: int, below: int | None = None, dropped: int = 0) -> Case:
    drawn = _Drawn(n + e + k)
    chosen, gates = drawn.normal(n, below or e).argsort(dim=1)[:, :k].contiguous(), drawn.normal(n, k)
    chosen.flatten()[:dropped] = e
    gates.flatten()[:dropped] = 0.0
    inputs = {"x": drawn.normal(n, 16), "chosen": chosen, "gates": gates}

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        def call() -> dict[str, Tensor]:
            rows, counts, route = suppliers["Experts.dispatch"](x["x"], x["chosen"], e)
            return {"tokens put together": suppliers["Experts.combine"](rows, x["gates"], route), "counts": counts}

        return call

    return Case(("Experts.dispatch", "Experts.combine"), name, Experts(16, 24, e, "gelu"), inputs, bind)


def _experts() -> Iterator[Case]:
    for kind in get_args(Activation):
        yield _computed(kind, kind, (5, 3, 8), 16, 24)
    yield _computed("experts without rows", "swiglu", (0, 9, 0), 16, 24)
    yield _computed("rows after the last expert's", "swiglu", (5, 0, 2), 16, 24, padding=4)
    yield _computed("odd widths", "swiglu", (5, 3, 8), 19, 23)
    yield _computed("a gradient sink that holds something", "swiglu", (5, 0, 8), 16, 24, sink=True)


def _computed(
    name: str, kind: Activation, counts: tuple[int, ...], d: int, f: int, padding: int = 0, sink: bool = False
) -> Case:
    drawn, e, wide, total = _Drawn(d + f), len(counts), f * (2 if kind == "swiglu" else 1), sum(counts)
    inputs = {"rows": drawn.normal(total + padding, d), "up": drawn.normal(e, wide, d), "down": drawn.normal(e, d, f)}
    inputs["counts"] = torch.tensor(counts, device="cpu")
    if sink:
        inputs[SINK] = drawn.normal(e, wide, d)

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        stale = torch.zeros((), dtype=torch.bool, device="cpu") if sink else None
        weights = Weights(x["up"], x.get(SINK), stale), Weights(x["down"], None, None)
        compute = suppliers["Experts.compute"]
        return lambda: {"rows": compute(x["rows"], x["counts"], *weights, kind, activation)[:total]}

    return Case(("Experts.compute",), name, Experts(d, f, e, kind), inputs, bind)


def _sum(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"the only rank's sum": suppliers["Router.summed"](x["counts"], ("batch", "sequence"))}
