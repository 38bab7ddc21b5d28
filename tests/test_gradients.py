"""Gradient sinks: what they sum, and when they say that it is final."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


def listened(net: Net) -> tuple[Sinks, list[str]]:
    sinks, heard = Sinks(dict(net.named_parameters())), list[str]()
    for sink in sinks.values():
        sink.listeners.append(lambda sink: heard.append(sink.name))
    return sinks, heard


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


@pytest.mark.parametrize("number", [1, 2, 4])
def test_buffers_hold_the_sum_over_micro_batches_that_autograd_gives(number: int) -> None:
    net, batches = Net(), micro_batches(number)
    sinks, _ = listened(net)
    step(sinks, net, batches)
    assert_sums(sinks, by_autograd(net, batches))


def test_a_weight_used_twice_by_linears_holds_both_contributions() -> None:
    layer = Linear(D, D, bias=True)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    sinks, x = Sinks(dict(layer.named_parameters())), torch.randn(B, D)
    sinks.begin_step()
    layer(layer(x)).sum().backward()
    weight = layer.weight.detach().double().requires_grad_()
    bias = layer.bias.detach().double()
    F.linear(F.linear(x.double(), weight, bias), weight, bias).sum().backward()
    torch.testing.assert_close(sinks["weight"].buffer.double(), weight.grad, rtol=1e-5, atol=1e-5)


def test_gradients_that_are_brought_are_summed_in_fp32_and_final_with_the_last() -> None:
    sinks = Sinks({"weight": nn.Parameter(torch.empty(2, 3))})
    sink, heard = sinks["weight"], list[str]()
    sink.buffer.fill_(7.0)
    sink.listeners.append(lambda sink: heard.append(sink.name))
    for _ in range(2):
        sinks.begin_step()
        for number in range(300):
            if number == 299:
                sinks.expect_last()
            assert heard == []
            sink.contribute(torch.full((2, 3), 1 / 256, dtype=torch.bfloat16))
        assert heard == ["weight"]
        sinks.finish()
        assert heard == ["weight"]
        assert bool((sink.buffer == 300 / 256).all()), "bf16 stops growing at 1"
        heard.clear()


def adding(grad_y: Tensor, x: Tensor, main_grad: Tensor | None) -> Tensor | None:
    """A supplied weight gradient that knows no more than its contract: it adds."""
    product = grad_y.flatten(0, -2).T @ x.flatten(0, -2)
    if main_grad is None:
        return product
    main_grad.add_(product)
    return None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("gemm", [Gemm(), Gemm(wgrad=adding)], ids=["default", "supplied"])
def test_what_buffers_held_before_a_step_takes_no_part_in_it(gemm: Gemm, compiled: bool) -> None:
    """Not even where it is not a number; and the buffer of a parameter that takes no part is zero."""
    net, batches = Net(), micro_batches(2)
    for layer in (part for part in net.modules() if isinstance(part, Linear)):
        layer.gemm = gemm
    sinks, _ = listened(net)
    sinks.arena.fill_(float("nan"))
    run = torch.compile(net, backend="aot_eager", fullgraph=True) if compiled else net
    step(sinks, run, batches)
    assert_sums(sinks, by_autograd(net, batches))
    torch.compiler.reset()


def test_who_adds_by_himself_calls_zero_if_stale_first() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    sinks = Sinks({"w": parameter})
    sinks.arena.fill_(7.0)
    sinks.begin_step()
    for _ in range(2):
        zero_if_stale(parameter.main_grad, parameter.main_grad_stale)  # type: ignore[attr-defined]
        parameter.main_grad.add_(1.0)  # type: ignore[attr-defined]
    sinks.finish()
    assert sinks["w"].buffer.tolist() == [2.0] * 3


@pytest.mark.parametrize("number", [1, 2, 4])
def test_every_sink_announces_its_gradient_exactly_once_a_step(number: int) -> None:
    net = Net()
    sinks, heard = listened(net)
    for _ in range(3):
        heard.clear()
        step(sinks, net, micro_batches(number))
        assert sorted(heard) == sorted(sinks)
        assert all(sink.final for sink in sinks.values())


def test_announcements_come_at_the_last_micro_batch_only_and_during_its_backward_pass() -> None:
    net = Net()
    sinks, heard = listened(net)
    heard_after: list[set[str]] = []
    step(sinks, net, micro_batches(3), after=lambda: heard_after.append(set(heard)))
    assert heard_after == [set(), set(), set(sinks) - {"idle"}]
    assert heard[-1] == "idle"  # nothing but the end of the step can tell that it takes no part


def test_what_a_listener_hears_is_the_whole_gradient() -> None:
    net, batches = Net(), micro_batches(3)
    sinks, snapshots = Sinks(dict(net.named_parameters())), {}

    def listener(sink: GradientSink) -> None:
        snapshots[sink.name] = sink.buffer.clone()

    for sink in sinks.values():
        sink.listeners.append(listener)
    step(sinks, net, batches)
    for name, sink in sinks.items():
        torch.testing.assert_close(snapshots[name], sink.buffer, rtol=0, atol=0)


def test_a_parameter_that_takes_part_in_some_micro_batches_only_is_announced_once_with_their_sum() -> None:
    net, batches = Net(), micro_batches(3)
    sinks, heard = listened(net)
    used = [False, True, False]

    def run(tokens: Tensor, labels: Tensor) -> Tensor:
        extra = 3 * net.idle.sum() if used.pop(0) else 0
        return net(tokens, labels) + extra

    step(sinks, run, batches)
    assert heard.count("idle") == 1
    assert sinks["idle"].buffer.tolist() == [3.0, 3.0]


def test_a_parameter_that_takes_part_only_before_the_last_micro_batch_is_announced_at_the_end() -> None:
    net = Net()
    sinks, heard = listened(net)
    sinks.begin_step()
    net.idle.sum().backward()
    sinks.expect_last()
    net(*micro_batches(1)[0]).backward()
    assert "idle" not in heard
    sinks.finish()
    assert heard.count("idle") == 1
    assert sinks["idle"].buffer.tolist() == [1.0, 1.0]


def test_with_counted_passes_a_tied_gradient_is_final_after_the_last_chunk_that_uses_it() -> None:
    """Two chunks of a rank share `tied`; the first chunk ends before the second has run its last pass."""
    tied, own = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    sinks, final = Sinks({"tied": tied, "own": own}), list[str]()
    sinks.chunks = 2
    for sink in sinks.values():
        sink.listeners.append(lambda one: final.append(one.name))
    sinks.begin_step()
    sinks.expect_passes({"tied": 4, "own": 2})
    for pass_, expected in (("first", []), ("second", []), ("first", ["own"]), ("second", ["own", "tied"])):
        names = ("tied", "own") if pass_ == "first" else ("tied",)
        sinks.begin_pass(names)
        (tied.sum() + (own.sum() if "own" in names else 0)).backward()
        assert final == expected
    sinks.finish()
    assert final == ["own", "tied"]
    assert sinks["tied"].buffer.tolist() == [4, 4]


def test_passes_that_are_missing_or_too_many_are_errors() -> None:
    sinks = Sinks({"tied": nn.Parameter(torch.ones(2))})
    sinks.begin_step()
    sinks.expect_passes({"tied": 2})
    sinks.begin_pass(["tied"])
    with pytest.raises(RuntimeError, match="'tied' is not complete: 1 passes are missing"):
        sinks.finish()
    sinks.begin_pass(["tied"])
    with pytest.raises(RuntimeError, match="contributes to the gradient of 'tied' after its last one"):
        sinks.begin_pass(["tied"])


def test_a_stepper_that_does_not_count_passes_cannot_run_chunks() -> None:
    sinks = Sinks({"tied": nn.Parameter(torch.ones(2))})
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


@pytest.mark.parametrize("recompute", [False, True])
def test_a_recomputed_block_contributes_once(recompute: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    net, batches = Net(), micro_batches(2)
    sinks, heard = listened(net)

    def run(tokens: Tensor, labels: Tensor) -> Tensor:
        return checkpoint(net, tokens, labels, use_reentrant=False) if recompute else net(tokens, labels)

    step(sinks, run, batches)
    assert_sums(sinks, by_autograd(net, batches))
    assert sorted(heard) == sorted(sinks)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
def test_sums_and_announcements_are_the_same_in_a_compiled_model() -> None:
    net, batches = Net(), micro_batches(3)
    sinks, heard = listened(net)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    heard_after: list[set[str]] = []
    for _ in range(2):
        heard.clear()
        step(sinks, compiled, batches, after=lambda: heard_after.append(set(heard)))
        assert_sums(sinks, by_autograd(net, batches))
        assert sorted(heard) == sorted(sinks)
    assert heard_after == [set(), set(), set(sinks) - {"idle"}] * 2
    torch.compiler.reset()


# Families.


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
