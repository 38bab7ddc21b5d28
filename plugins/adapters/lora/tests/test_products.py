"""The products of adapters that no supplier takes part in: their values, their gradients, and the passes they save.

`pytest --wide compile` reads the code that inductor makes of a block.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_words import COMPILING
from mplug_lora.modules import LowRank
from mplug_lora.targets import Pair
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mplug import Segment
from mplug_nn import Linear, Product
from mplug_testing.harness import tiny_config
from mplug_testing.runs import trained

RANK, WIDTH, SCALE = 2, 6, 1.5
PAIRS = tuple(Pair(Segment("heads", length), length) for length in (4, 3, 5))


def adapted(chosen: tuple[int, ...]) -> tuple[Linear, Tensor]:
    """A frozen linear with an adapter of some of three pairs, and an input."""
    torch.manual_seed(1)
    linear = Linear(WIDTH, 12, bias=False).double()
    linear.adapter = LowRank("embed", PAIRS, chosen, WIDTH, RANK, SCALE).double()
    for parameter in linear.parameters():
        torch.nn.init.normal_(parameter)
    linear.weight.requires_grad_(False)
    return linear, torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)


def weight_of(linear: Linear, chosen: tuple[int, ...]) -> Tensor:
    """W + scale B A by autograd."""
    adapter: Any = linear.adapter
    parts = list(linear.weight.split([pair.length for pair in PAIRS]))
    for place, number in enumerate(chosen):
        down = adapter.a.weight[place * RANK : (place + 1) * RANK]
        parts[number] = parts[number] + SCALE * getattr(adapter, f"b{number}").weight @ down
    return torch.cat(parts)


@pytest.mark.parametrize("chosen", [(0, 1, 2), (1,), (0, 2)], ids=str)
def test_values_and_gradients_are_those_of_the_merged_weight(chosen: tuple[int, ...]) -> None:
    linear, x = adapted(chosen)
    inputs = [x, *(one for one in linear.parameters() if one.requires_grad)]
    upstream = torch.randn(2, 5, 12, dtype=torch.float64)
    y, merged = linear(x), x @ weight_of(linear, chosen).t()
    assert torch.allclose(y, merged, rtol=1e-12)
    found, expected = (torch.autograd.grad(one, inputs, upstream) for one in (y, merged))
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found, expected, strict=True))


class Keeping(Product):
    """A supplier that keeps its result for backward, as no product of mplug does."""

    def forward(self, x: Tensor, weight: Any, narrow: Any, buffers: Any) -> Any:
        y = x @ weight.values.t()
        return y, (y,)

    def dgrad(self, grad_y: Tensor, weight: Any, saved: Any, narrow: Any, buffers: Any, needs_x: bool) -> Any:
        self.kept = saved[0].clone()
        return grad_y @ weight.values, ()


def test_a_supplier_of_the_product_keeps_its_result_and_its_place() -> None:
    linear, x = adapted((0, 1, 2))
    linear.product = supplier = Keeping()
    linear(x).sum().backward()
    assert torch.allclose(supplier.kept, x @ linear.weight.t())
    (grad_x,) = torch.autograd.grad((x @ weight_of(linear, (0, 1, 2)).t()).sum(), x)
    assert x.grad is not None
    assert torch.allclose(x.grad, grad_x, rtol=1e-12)


class Doubling(Product):
    """A supplier of an adapter's product, which must run although mplug has a faster way."""

    def forward(self, x: Tensor, weight: Any, narrow: Any, buffers: Any) -> Any:
        return 2 * x @ weight.values.t(), ()


@pytest.mark.parametrize("which", ["a", "b1"])
def test_a_supplier_of_an_adapters_product_is_called(which: str) -> None:
    linear, x = adapted((1,))
    plain = linear(x) - x @ linear.weight.t()
    getattr(linear.adapter, which).product = Doubling()
    assert torch.allclose(linear(x) - x @ linear.weight.t(), 2 * plain)


def test_torch_counts_the_products() -> None:
    linear, x = adapted((0, 2))
    with FlopCounterMode(display=False) as counter:
        linear(x).sum().backward()
    rows, of_a, of_b = 10, 2 * RANK * WIDTH, RANK * (4 + 5)
    assert counter.get_total_flops() == 2 * rows * (2 * 12 * WIDTH + 3 * of_a + 3 * of_b)


@pytest.mark.wide("compile")
@COMPILING
def test_compiled_blocks_add_in_place_and_compute_no_gradient_of_frozen_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.graph import GraphLowering

    codes: list[str] = []
    original = GraphLowering.codegen

    def kept(graph: Any) -> Any:
        made = original(graph)
        codes.append(made[0].value)
        return made

    monkeypatch.setattr(GraphLowering, "codegen", kept)
    shape = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 96, "vocab_size": 259}
    settings: dict[str, Any] = {f"model.{name}": value for name, value in shape.items()}
    settings |= {"model.name": "llama", "adapters.lora.rank": 8, "trainer.steps": 1, "trainer.eval_every": 0}
    settings |= {"trainer.compile": "inductor", "trainer.precision": "bf16", "checkpoint.asynchronous": False}
    uncached = torch._inductor.config.patch(fx_graph_cache=False)
    with uncached, torch._functorch.config.patch(enable_autograd_cache=False):
        trained(tiny_config(settings), tmp_path)
    calls = [re.findall(r"(?:extern_kernels|torch\.ops\.\w+)\.(\w+)(?:\.default)?\(", code) for code in codes]
    forward = [one for one in calls if "add_products" in one and "products" not in one]
    assert [(one.count("mm"), one.count("add_products")) for one in forward] == [(8, 4)] * 2, "four linears and their A"
    backward = [one for one in calls if "products" in one]
    assert sorted(one.count("mm") for one in backward) == [3, 4], "no gradient of a frozen weight or embedding"
    assert {one.count("products") for one in backward} == {4}
    assert {one.count("add_product") for one in backward} == {4 + 7}, "four A and seven B, to their sinks"
    assert not [code for code in codes if "add_products" in code and re.search(r"cpp_fused_\w*clone", code)]
