"""The ends of a language model: embedding, dropout, loss. B batch, S sequence, D embed, V vocabulary."""

from collections.abc import Callable, Iterator
from typing import Literal

from torch import Tensor

from mplug_nn import Divergence, Dropout, Embedding, Loss, Objective
from mplug_nn.loss import IGNORED, WEIGHTED
from mplug_testing.kernel_cases.case import Case, Drawn, Suppliers, Tensors
from mplug_testing.kernel_cases.dense import with_weight

KINDS: tuple[Literal["forward", "reverse", "jsd"], ...] = ("forward", "reverse", "jsd")


def end_cases() -> Iterator[Case]:
    """Cases of `Embedding.lookup`, `Dropout.rows`, and the slots of `Loss` and `Objective`."""
    yield from _lookups()
    yield from _rows()
    yield from _losses()
    yield _log_probabilities("every label a target", (2, 16), 40)
    yield _log_probabilities("no target at all", (1, 8), 40, ignored=8)
    yield _log_probabilities("an odd vocabulary and length, ignored labels", (2, 33), 37, ignored=5)
    yield from (_divergence(kind, (2, 33), 37, ignored=5) for kind in KINDS)
    yield from (_top_divergence(f"{k} of 37 tokens", (2, 33), 37, k, ignored=5) for k in (4, 37))
    yield from (_top_probabilities(f"{k} of 37 tokens", (2, 33), 37, k) for k in (4, 37))
    yield Case(("Objective.summed",), "values [B, N, F]", Objective(), {"values": Drawn(0).normal(2, 3, 2)}, _of_parts)
    values = {"values": Drawn(0).normal(2, 16, 3)}
    yield Case(("Objective.gathered",), "values [B, S, F]", Objective(), values, _of_positions)


def _lookups() -> Iterator[Case]:
    yield _lookup("tokens, some of them several times", (2, 16), 11)
    yield _lookup("positions [1, S]", (1, 16), 40)
    yield _lookup("batch 1 and length 1", (1, 1), 11)


def _lookup(name: str, rows: tuple[int, ...], v: int) -> Case:
    drawn = Drawn(v)
    inputs = {"indices": drawn.integers(v, *rows), "weight": drawn.normal(v, 24)}

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        look_up = suppliers["Embedding.lookup"]
        return lambda: {"output": look_up(x["indices"], x["weight"])}

    return Case(("Embedding.lookup",), name, Embedding(v, 24), inputs, bind)


def _rows() -> Iterator[Case]:
    for name, shape in (("positions [1, S]", (1, 16)), ("positions [B, S]", (2, 16)), ("length 1", (1, 1))):
        positions = Drawn(0).integers(1000, *shape)

        def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
            return lambda: {"numbering of rows": suppliers["Dropout.rows"](x["positions"])}

        yield Case(("Dropout.rows",), name, Dropout(0.1), {"positions": positions}, bind)


def _losses() -> Iterator[Case]:
    yield _loss("every label a target", (2, 16), 40)
    yield _loss("ignored labels", (2, 16), 40, ignored=11)
    yield _loss("no target at all", (1, 8), 40, ignored=8)
    yield _loss("an odd vocabulary and length", (2, 33), 37, ignored=5)
    yield _loss("batch 1 and length 1", (1, 1), 40)
    yield _loss("weights of losses", (2, 16), 40, ignored=5, needs=frozenset({WEIGHTED}))


def _loss(name: str, rows: tuple[int, int], v: int, ignored: int = 0, needs: frozenset[str] = frozenset()) -> Case:
    d, drawn = 24, Drawn(v + rows[1])
    labels = drawn.integers(v, *rows)
    labels.flatten()[:ignored] = IGNORED  # a view: the labels are contiguous
    inputs = {"hidden": drawn.normal(*rows, d), "weight": drawn.normal(v, d), "labels": labels}
    inputs |= {"hundredths": drawn.integers(300, *rows)} if WEIGHTED in needs else {}

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        project, loss = with_weight(d, v, x["weight"]), suppliers["Loss.cross_entropy"]

        def call() -> dict[str, Tensor]:
            weights = (x["hundredths"] / 100,) if "hundredths" in x else ()
            total, count = loss(x["hidden"], project, x["labels"], *weights)
            return {"loss": total, "number of targets": count}

        return call

    return Case(("Loss.cross_entropy",), name, Loss(), inputs, bind, needs)


def _log_probabilities(name: str, rows: tuple[int, int], v: int, ignored: int = 0) -> Case:
    d, drawn = 24, Drawn(v + rows[1])
    labels = drawn.integers(v, *rows)
    labels.flatten()[:ignored] = IGNORED  # a view: the labels are contiguous
    inputs = {"hidden": drawn.normal(*rows, d), "weight": drawn.normal(v, d), "labels": labels}

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        project, of_labels = with_weight(d, v, x["weight"]), suppliers["Loss.log_probabilities"]
        return lambda: {"log-probabilities": of_labels(x["hidden"], project, x["labels"])}

    return Case(("Loss.log_probabilities",), name, Objective(), inputs, bind)


def _divergence(kind: Literal["forward", "reverse", "jsd"], rows: tuple[int, int], v: int, ignored: int) -> Case:
    """The teacher's tensors are whole numbers of hundredths, because they have no gradient."""
    d, drawn = 24, Drawn(v + rows[1])
    labels = drawn.integers(v, *rows)
    labels.flatten()[:ignored] = IGNORED  # a view: the labels are contiguous
    inputs = {"hidden": drawn.normal(*rows, d), "weight": drawn.normal(v, d), "labels": labels}
    inputs |= {"taught": drawn.integers(300, *rows, d), "taught_weight": drawn.integers(100, v, d)}

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        taught, weight = ((x[name] / 100).to(x["hidden"].dtype) for name in ("taught", "taught_weight"))
        project, of_teacher = with_weight(d, v, x["weight"]), with_weight(d, v, weight)
        form, found = Divergence(kind, 0.3, 2.0), suppliers["Loss.divergence"]
        return lambda: {"divergences": found(x["hidden"], project, taught, of_teacher, x["labels"], form)}

    return Case(("Loss.divergence",), kind, Objective(), inputs, bind)


def _top_divergence(name: str, rows: tuple[int, int], v: int, k: int, ignored: int) -> Case:
    """The teacher's probabilities are those of whole numbers, because they have no gradient."""
    d, drawn = 24, Drawn(v + k)
    labels = drawn.integers(v, *rows)
    labels.flatten()[:ignored] = IGNORED  # a view: the labels are contiguous
    inputs = {"hidden": drawn.normal(*rows, d), "weight": drawn.normal(v, d), "labels": labels}
    inputs |= {"order": drawn.integers(1 << 30, *rows, v), "taught": drawn.integers(7, *rows, k + 1)}

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        project, found = with_weight(d, v, x["weight"]), suppliers["Loss.top_divergence"]
        tokens, taught = x["order"].argsort(dim=-1)[..., :k], x["taught"].to(x["hidden"].dtype)
        taught[..., -1] = taught[..., -1] if k < v else float("-inf")  # then there is no rest
        logs = taught.log_softmax(dim=-1)
        return lambda: {"divergences": found(x["hidden"], project, x["labels"], tokens, logs)}

    return Case(("Loss.top_divergence",), name, Objective(), inputs, bind)


def _top_probabilities(name: str, rows: tuple[int, int], v: int, k: int) -> Case:
    """Without the tokens: those of logits that are equal in a low precision may differ."""
    d, drawn = 24, Drawn(v + k)
    inputs = {"hidden": drawn.normal(*rows, d), "weight": drawn.normal(v, d)}

    def bind(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
        project, found = with_weight(d, v, x["weight"]), suppliers["Loss.top_probabilities"]
        return lambda: {"probabilities": found(x["hidden"], project, k)[1].exp()}

    return Case(("Loss.top_probabilities",), name, Objective(), inputs, bind)


def _of_positions(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"the only rank's positions": suppliers["Objective.gathered"](x["values"])}


def _of_parts(suppliers: Suppliers, x: Tensors) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"the only rank's sums": suppliers["Objective.summed"](x["values"])[0]}
