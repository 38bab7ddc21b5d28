"""Gradient sinks: what they sum, and when they say that it is final."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mplug.gradients.sinks import GradientSink, Sinks
from mplug_nn import MLP, Embedding, Gemm, Linear, Norm, zero_if_stale

V, D, B, S = 11, 6, 3, 5


class Net(nn.Module):
    """A table that is looked up and projects too, a gemm, a norm, and a parameter that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Embedding(V, D)
        self.norm = Norm(D, "layernorm", bias=True)
        self.mlp = MLP(D, 2 * D, "gelu", bias=True)
        self.project = Linear(D, V, bias=False)
        self.project.weight = self.table.weight
        self.idle = nn.Parameter(torch.zeros(2))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h, x = self.norm(self.table(tokens))
        logits = self.project(x + self.mlp(h))
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")


def micro_batches(number: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(V, (number, 2, B, S), generator=generator)
    return [(tokens, labels) for tokens, labels in drawn]


def by_autograd(net: Net, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The sum of the gradients in fp64, by autograd alone: no sink hangs on the copy."""
    exact = copy.deepcopy(net)
    for parameter in exact.parameters():
        vars(parameter).pop("main_grad", None)
    exact = exact.double()
    for tokens, labels in batches:
        exact(tokens, labels).backward()
    zeros = torch.zeros
    return {name: zeros(p.shape) if p.grad is None else p.grad for name, p in exact.named_parameters()}


def listened(net: nn.Module) -> tuple[Sinks, list[str], dict[str, Tensor]]:
    """The sinks, the names that they announce, and each gradient as it was at its announcement."""
    sinks, heard, then = Sinks(dict(net.named_parameters())), list[str](), dict[str, Tensor]()

    def listener(sink: GradientSink) -> None:
        heard.append(sink.name)
        then[sink.name] = sink.buffer.clone()

    for sink in sinks.values():
        sink.listeners.append(listener)
    return sinks, heard, then


def step(
    sinks: Sinks,
    run: Callable[[Tensor, Tensor], Tensor],
    batches: list[tuple[Tensor, Tensor]],
    after: Callable[[], None] = lambda: None,
) -> None:
    sinks.begin_step()
    for number, (tokens, labels) in enumerate(batches):
        if number == len(batches) - 1:
            sinks.expect_last()
        run(tokens, labels).backward()
        after()
    sinks.finish()


def assert_sums(sinks: Sinks, expected: dict[str, Tensor]) -> None:
    assert set(sinks) == set(expected)
    for name, sink in sinks.items():
        assert sink.buffer.dtype is torch.float32
        torch.testing.assert_close(sink.buffer.double(), expected[name].double(), rtol=2e-5, atol=2e-5, msg=name)


def test_gradients_that_are_brought_are_summed_in_fp32_and_final_with_the_last() -> None:
    net = nn.Module()
    net.weight = nn.Parameter(torch.empty(2, 3))
    sinks, heard, _ = listened(net)
    sinks.arena.fill_(7.0)
    for _ in range(2):
        sinks.begin_step()
        for number in range(300):
            if number == 299:
                sinks.expect_last()
            assert heard == []
            sinks["weight"].contribute(torch.full((2, 3), 1 / 256, dtype=torch.bfloat16))
        sinks.finish()
        assert heard == ["weight"]
        assert bool((sinks["weight"].buffer == 300 / 256).all()), "bf16 stops growing at 1"
        heard.clear()


def adding(grad_y: Tensor, x: Tensor, main_grad: Tensor | None) -> Tensor | None:
    """A supplied weight gradient that knows no more than its contract: it adds."""
    product = grad_y.flatten(0, -2).T @ x.flatten(0, -2)
    if main_grad is None:
        return product
    main_grad.add_(product)
    return None


def compiled(net: Net) -> Callable[..., Tensor]:
    return torch.compile(net, backend="aot_eager", fullgraph=True)


def recomputed(net: Net) -> Callable[..., Tensor]:
    return lambda *given: checkpoint(net, *given, use_reentrant=False)


def eager(net: Net) -> Callable[..., Tensor]:
    return net


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
@pytest.mark.parametrize("gemm", [Gemm(), Gemm(wgrad=adding)], ids=["default", "supplied"])
@pytest.mark.parametrize(
    ("number", "how"),
    [(1, eager), (2, eager), (4, eager), (2, recomputed), (3, compiled)],
    ids=["1", "2", "4", "recomputed", "compiled"],
)
@pytest.mark.wide(
    "compile",
    quick=[
        *(f"{how}-{gemm}" for how in (1, 2, 4, "recomputed") for gemm in ("default", "supplied")),
    ],
)
def test_sinks_hold_the_sums_of_a_step_and_announce_each_once_in_its_last_backward_pass(
    number: int, how: Callable[[Net], Callable[..., Tensor]], gemm: Gemm
) -> None:
    """Whatever they held before, even if it was not a number; a parameter that takes no part holds zero."""
    net, batches = Net(), micro_batches(number)
    for layer in (part for part in net.modules() if isinstance(part, Linear)):
        layer.gemm = gemm
    sinks, heard, then = listened(net)
    run, expected = how(net), by_autograd(net, batches)
    for _ in range(2):
        sinks.arena.fill_(float("nan"))
        heard.clear()
        heard_after: list[set[str]] = []
        step(sinks, run, batches, after=lambda: heard_after.append(set(heard)))  # noqa: B023
        assert_sums(sinks, expected)
        assert all(torch.equal(then[name], sink.buffer) and sink.final for name, sink in sinks.items())
        assert sorted(heard) == sorted(sinks)
        assert heard[-1] == "idle", "the end of the step alone can tell that it takes no part"
        assert heard_after == [set()] * (number - 1) + [set(sinks) - {"idle"}]
    torch.compiler.reset()


def test_who_adds_by_himself_calls_zero_if_stale_first() -> None:
    parameter: Any = nn.Parameter(torch.zeros(3))
    sinks = Sinks({"w": parameter})
    sinks.arena.fill_(7.0)
    sinks.begin_step()
    for _ in range(2):
        zero_if_stale(parameter.main_grad, parameter.main_grad_stale)
        parameter.main_grad.add_(1.0)
    sinks.finish()
    assert sinks["w"].buffer.tolist() == [2.0] * 3


@pytest.mark.parametrize("used", [(False, True, False), (True, False, False)])
def test_a_parameter_that_takes_part_before_the_last_micro_batch_only_is_announced_once_at_the_end(
    used: tuple[bool, ...],
) -> None:
    net, takes_part = Net(), iter(used)
    sinks, heard, _ = listened(net)
    after: list[bool] = []
    run = lambda *given: net(*given) + (3 * net.idle.sum() if next(takes_part) else 0)  # noqa: E731
    step(sinks, run, micro_batches(3), after=lambda: after.append("idle" in heard))
    assert (after, heard.count("idle")) == ([False] * 3, 1)
    assert sinks["idle"].buffer.tolist() == [3.0, 3.0]


def test_with_counted_passes_a_tied_gradient_is_final_after_the_last_chunk_that_uses_it() -> None:
    """Two chunks of a rank share `tied`; the first chunk ends before the second has run its last pass."""
    net = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in ("tied", "own")})
    sinks, final, _ = listened(net)
    sinks.chunks = 2
    sinks.begin_step()
    sinks.expect_passes({"tied": 4, "own": 2})
    for pass_, expected in (("first", []), ("second", []), ("first", ["own"]), ("second", ["own", "tied"])):
        names = ("tied", "own") if pass_ == "first" else ("tied",)
        sinks.begin_pass(names)
        sum(net[name].sum() for name in names).backward()
        assert final == expected
    sinks.finish()
    assert final == ["own", "tied"]
    assert sinks["tied"].buffer.tolist() == [4, 4]


def test_passes_that_are_missing_too_many_or_not_counted_are_errors() -> None:
    sinks = Sinks({"tied": nn.Parameter(torch.ones(2))})
    sinks.begin_step()
    sinks.expect_passes({"tied": 2})
    sinks.begin_pass(["tied"])
    with pytest.raises(RuntimeError, match="'tied' is not complete: 1 passes are missing"):
        sinks.finish()
    sinks.begin_pass(["tied"])
    with pytest.raises(RuntimeError, match="contributes to the gradient of 'tied' after its last one"):
        sinks.begin_pass(["tied"])
    sinks.chunks = 2
    sinks.begin_step()
    with pytest.raises(RuntimeError, match=r"this rank has 2 chunks of units.*declare the passes by"):
        sinks.expect_last()


def test_a_frozen_parameter_has_no_sink_and_its_linear_still_passes_gradients_on() -> None:
    layer = Linear(D, D, bias=True)
    nn.init.normal_(layer.weight)
    nn.init.zeros_(layer.bias)
    layer.weight.requires_grad_(False)
    sinks, x = Sinks(dict(layer.named_parameters())), torch.randn(B, D, requires_grad=True)
    assert list(sinks) == ["bias"]
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(dim=0).expand(B, D))
    assert sinks["bias"].buffer.tolist() == [float(B)] * D


def test_each_family_has_a_part_of_the_arena_to_itself_and_keeps_the_order_of_backward() -> None:
    net = Net()
    families = {name: ("experts",) if "mlp" in name else ("all",) for name, _ in net.named_parameters()}
    sinks = Sinks(dict(net.named_parameters()), families)
    assert list(sinks) == list(Sinks(dict(net.named_parameters())))
    held = [[sink.name for sink in sinks_of] for sinks_of, _ in sinks.stretches(10**9)]
    backwards = list(reversed(list(sinks)))
    assert held == [[n for n in backwards if "mlp" in n], [n for n in backwards if "mlp" not in n]]
    stretches = [tensor for _, tensor in sinks.stretches(1)]
    assert torch.equal(torch.cat(stretches), sinks.arena)
    assert all(len({families[sink.name] for sink in one}) == 1 for one, _ in sinks.stretches(2 * D * 4))
