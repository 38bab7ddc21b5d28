"""Experts, and the router's sums. D embed, F mlp, N tokens, E experts."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mplug_nn import Experts, Gating, MixtureOfExperts, Router, Weights
from mplug_nn.activations import ACTIVATIONS, is_gated
from mplug_nn.grouped import apply_grouped
from mplug_nn.mlp import activation
from mplug_testing.grouped import PRODUCT, after_groups, expert_site, of_weight
from mplug_testing.kernel_cases.case import BUFFERS, SINK, Case, Drawn, Suppliers, Tensors


def expert_cases() -> Iterator[Case]:
    """Cases of the slots of `Experts`, `Router` and `MixtureOfExperts`."""
    yield from _routes()
    yield from _experts()
    yield from _products()
    yield Case(("Router.summed",), "counts [E]", Router(8, Gating(4, 2)), {"counts": Drawn(0).integers(9, 4)}, _sum)
    yield from _balances()
    mixture = MixtureOfExperts(Router(8, Gating(4, 2)), 8, 16, "gelu")
    values = {"values": Drawn(0).integers(9, 2, 5)}
    yield Case(("MixtureOfExperts.over_sequences",), "values [B, S]", mixture, values, _running_sum)
    tokens = {"x": Drawn(1).normal(9, 16), "gates": Drawn(2).normal(9, 2)}
    yield Case(("MixtureOfExperts.parts",), "tokens [N, D] and gates [N, k]", mixture, tokens, _joined)


def _routes() -> Iterator[Case]:
    yield _route("each expert chosen", 16, 4, 2)
    yield _route("one choice a token", 16, 4, 1)
    yield _route("experts that nobody chooses", 16, 9, 2, below=3)
    yield _route("one expert that gets all", 16, 4, 1, below=1)
    yield _route("choices that were dropped", 16, 4, 2, dropped=9)
    yield _route("rows for the kept choices alone", 16, 4, 2, dropped=9, bounded=True)
    yield _route("one token", 1, 4, 2)


def _route(
    name: str, n: int, e: int, k: int, below: int | None = None, dropped: int = 0, bounded: bool = False
) -> Case:
    drawn, bound = Drawn(n + e + k), (n * k - dropped,) if bounded else ()
    chosen, gates = drawn.normal(n, below or e).argsort(dim=1)[:, :k].contiguous(), drawn.normal(n, k)
    chosen.flatten()[:dropped] = e
    gates.flatten()[:dropped] = 0.0
    inputs = {"x": drawn.normal(n, 16), "chosen": chosen, "gates": gates}

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        def call() -> dict[str, Tensor]:
            rows, counts, route = suppliers["Experts.dispatch"](x["x"], x["chosen"], x["gates"], e, *bound)
            rows, route = suppliers["Experts.leave"](*suppliers["Experts.arrive"](rows, route))
            return {"tokens put together": suppliers["Experts.combine"](rows, x["gates"], route), "counts": counts}

        return call

    return Case(
        ("Experts.dispatch", "Experts.arrive", "Experts.leave", "Experts.combine"),
        name,
        Experts(16, 24, e, "gelu"),
        inputs,
        bind,
    )


def _experts() -> Iterator[Case]:
    for kind in ACTIVATIONS.list.own:
        yield _computed(kind, kind, (5, 3, 8), 16, 24)
    yield _computed("experts without rows", "swiglu", (0, 9, 0), 16, 24)
    yield _computed("rows after the last expert's", "swiglu", (5, 0, 2), 16, 24, padded=True)
    yield _computed("odd widths", "swiglu", (5, 3, 8), 19, 23)
    yield _computed("a gradient sink that holds something", "swiglu", (5, 0, 8), 16, 24, sink=True)


def _computed(
    name: str, kind: str, counts: tuple[int, ...], d: int, f: int, padded: bool = False, sink: bool = False
) -> Case:
    drawn, e, wide, total = Drawn(d + f), len(counts), f * (2 if is_gated(kind) else 1), sum(counts)
    inputs = {"rows": drawn.normal(total, d), "up": drawn.normal(e, wide, d), "down": drawn.normal(e, d, f)}
    inputs["counts"] = torch.tensor(counts, device="cpu")
    if sink:
        inputs[SINK] = drawn.normal(e, wide, d)

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        stale = torch.zeros((), dtype=torch.bool, device="cpu") if sink else None
        weights = Weights(x["up"], x.get(SINK), stale), Weights(x["down"], None, None)
        compute = suppliers["Experts.compute"]

        def call() -> dict[str, Tensor]:
            rows = after_groups(x["rows"]) if padded else x["rows"]
            return {"rows": compute(rows, x["counts"], *weights, kind, activation)[:total]}

        return call

    return Case(("Experts.compute",), name, Experts(d, f, e, kind), inputs, bind, ACTIVATIONS.needs(kind))


def _products() -> Iterator[Case]:
    yield _product("rows [M, I]", (16, 16, 32), 32, 48)
    yield _product("experts without rows", (0, 32, 0), 32, 48)
    yield _product("numbers of rows that are odd", (5, 3, 8), 32, 48)
    yield _product("rows after the last expert's", (5, 0, 2), 32, 48, padded=True)
    yield _product("odd widths", (5, 3, 8), 19, 23)
    yield _product("a gradient sink that holds something", (5, 0, 8), 32, 48, sink=True)


def _product(name: str, counts: tuple[int, ...], i: int, o: int, padded: bool = False, sink: bool = False) -> Case:
    drawn, e, total = Drawn(i + o), len(counts), sum(counts)
    inputs = {"rows": drawn.normal(total, i), "weight": drawn.normal(e, o, i)}
    inputs["counts"] = torch.tensor(counts, device="cpu")
    if sink:
        inputs[SINK] = drawn.normal(e, o, i)

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        stale = torch.zeros((), dtype=torch.bool, device="cpu") if sink else None
        weights, product = Weights(x["weight"], x.get(SINK), stale), suppliers[PRODUCT]
        own = of_weight(suppliers.get(BUFFERS, {}).get(PRODUCT, {}), "up")

        def call() -> dict[str, Tensor]:
            rows = after_groups(x["rows"]) if padded else x["rows"]
            return {"rows": apply_grouped(product, rows, x["counts"], weights, buffers=own)[:total]}

        return call

    return Case((PRODUCT,), name, Experts(i, o, e, "gelu"), inputs, bind, parameters=expert_site(i, o).parameters)


def _balances() -> Iterator[Case]:
    yield _balance("logits [B, S, E]", (2, 24, 4))
    yield _balance("as many tokens as experts, and three of them", (2, 3, 3))
    yield _balance("one token", (1, 1, 5))
    yield _balance("one expert that all tokens prefer by far", (2, 37, 6), preferred=90.0)


def _balance(name: str, shape: tuple[int, int, int], preferred: float = 0.0) -> Case:
    logits = Drawn(sum(shape)).normal(*shape)
    logits[..., 0] += preferred
    router = Router(8, Gating(shape[-1], 1, "sinkhorn"))

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        balanced_scores = suppliers["Router.balanced_scores"]
        return lambda: {"shares": balanced_scores(x["logits"].detach(), "sinkhorn")}

    return Case(("Router.balanced_scores",), name, router, {"logits": logits}, bind)


def _running_sum(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
    over_sequences = suppliers["MixtureOfExperts.over_sequences"]
    return lambda: {"a result": over_sequences(lambda values: values.cumsum(dim=1), x["values"])}


def _joined(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
    def call() -> dict[str, Tensor]:
        tokens, gates = zip(*suppliers["MixtureOfExperts.parts"](x["x"], x["gates"]), strict=True)
        return {"tokens put together": torch.cat(tokens), "gates put together": torch.cat(gates)}

    return call


def _sum(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"the only rank's sum": suppliers["Router.summed"](x["counts"], ("batch", "sequence"))}
