"""The suite of kernels checks declared buffers: a sound supplier passes, and every planted fault is caught by name."""

from collections.abc import Callable

import pytest
import torch
from mplug_nn import operator
from mplug_testing import Fault, KernelSuite
from mplug_testing.buffer_trials import BufferTrial
from mplug_testing.grouped import WEIGHTS
from torch import Tensor

Plant = Callable[..., None]


class TestDelayed(KernelSuite):
    """The package as it is passes the whole suite, with a grid that is finer than fp32 and wide enough for any step."""

    plugin = "delayed"
    dtypes = ("fp32",)
    settings = {"kernels.delayed.bits": 30, "kernels.delayed.margin": 16.0}
    examples = {"bits": [6]}
    beside = {"margin": {"kernels.delayed.bits": 6}}
    without_effect = {"history": "it counts steps, and the suite looks at one"}

    @pytest.fixture(autouse=True)
    def planted(self, plant: Plant) -> None:
        plant("acme-delayed")


class Coarse(KernelSuite):
    """A grid so coarse that its scale shows in every result."""

    plugin = "delayed"
    settings = {"kernels.delayed.bits": 6}


LARGEST_INPUT = 'keep_max(buffers["input"], x.abs().amax())'
TOTAL = 'count(buffers["total"], x.abs().sum(dtype=buffers["total"].dtype))'
SPAN = 'span = margin * buffers["history"][operand].amax().to(x.dtype)'
FAULTS: dict[str, tuple[str, str, str]] = {
    "state elsewhere": (
        SPAN,
        "seen = globals().setdefault('SEEN', []); span = x.abs().amax() * (1 + len(seen) % 5); seen.append(1)",
        "the supplier keeps state outside of its buffers",
    ),
    "a buffer that nobody declares": (
        LARGEST_INPUT,
        f'{LARGEST_INPUT}; buffers["newest"] = x.abs().amax()',
        "a pass adds 'newest' to its buffers",
    ),
    "a state that forward writes": (
        LARGEST_INPUT,
        f'{LARGEST_INPUT}; buffers["history"].mul_(2).add_(1)',
        "a pass changes the state 'history'",
    ),
    "a scale of the present step": (
        SPAN,
        'span = buffers["weight"].to(x.dtype)',
        "results depend on a statistic before the step ends",
    ),
    "a sum of largest values": (
        '"input": SlotBuffer(over=(*TOKENS, *inputs), reduction="max")',
        '"input": SlotBuffer(over=(*TOKENS, *inputs))',
        r"after two micro batches|the sum 'input' is \S+; in one pass over everything it is",
    ),
    "the largest of sums": (
        '"total": SlotBuffer(over=(*TOKENS, *inputs))',
        '"total": SlotBuffer(over=(*TOKENS, *inputs), reduction="max")',
        "from the values of two ranks that divide the batch, the max 'total'",
    ),
    "samples left out": (
        '"input": SlotBuffer(over=(*TOKENS, *inputs), reduction="max")',
        '"input": SlotBuffer(over=("sequence", *inputs), reduction="max")',
        "'input' depends on the part of the batch that a rank has; add 'batch' to its `over`",
    ),
    "positions left out": (
        '"row_totals": SlotBuffer(**rows, over=TOKENS)',
        '"row_totals": SlotBuffer(**rows, over=("batch",))',
        "'row_totals' depends on the part of the sequence",
    ),
    "a width left out": (
        '"gradient": SlotBuffer(over=(*TOKENS, *outputs), reduction="max")',
        '"gradient": SlotBuffer(over=TOKENS, reduction="max")',
        "'gradient' depends on the part of the mlp",
    ),
    "a width too many": (
        '"total": SlotBuffer(over=(*TOKENS, *inputs))',
        '"total": SlotBuffer(over=(*TOKENS, *inputs, *outputs))',
        "from the values of two ranks that divide the mlp, the sum 'total'",
    ),
    "recomputation counts": (
        TOTAL,
        'count_in_backward(buffers["total"], x.abs().sum(dtype=buffers["total"].dtype))',
        "with recomputation, the sum 'total'",
    ),
    "backward counts nothing": (
        'count_in_backward(buffers["row_totals"]',
        'count(buffers["row_totals"]',
        "no pass writes the statistic 'row_totals'",
    ),
    "what nobody declared": ('"row_totals": SlotBuffer(**rows, over=TOKENS),', "", "KeyError: 'row_totals'"),
    "sites are mixed": (
        "history = torch.cat((newest[..., None]",
        "history = torch.cat((newest[..., None] + newest.sum()",
        "step_ended mixes the sites of a role",
    ),
    "arguments change": (
        '"last_total": stacked["total"]',
        '"last_total": stacked["total"].mul_(2)',
        "step_ended (changes its arguments|mixes)",
    ),
}


@pytest.mark.parametrize(("old", "new", "message"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_of_buffers_is_caught(plant: Plant, old: str, new: str, message: str) -> None:
    plant("acme-delayed", old, new)
    with pytest.raises(Fault, match=message):
        Coarse().test_its_buffers_are_what_it_declares("fp32")


@operator("acme::silent")
def silent(total: Tensor, values: Tensor) -> None:
    """Adds in forward, and does not say so in `mutates_args`."""
    if torch._C._current_graph_task_id() == -1:
        total.add_(values)


def test_a_mutation_that_the_compiler_does_not_know_is_caught(plant: Plant) -> None:
    plant("acme-delayed", f"    {TOTAL}", f"    {TOTAL.replace('count', 'torch.ops.acme.silent')}")
    with pytest.raises(Fault, match="in a compiled unit, the sum 'total'"):
        Coarse().test_its_buffers_are_what_it_declares("fp32")


OF_EXPERTS: dict[str, tuple[str, str, str]] = {
    "as it is": ("", "", ""),
    "experts left out": (
        '"input": (*TOKENS, *experts, *inputs)',
        '"input": (*TOKENS, *inputs)',
        "'up_input' depends on the part of the expert that a rank has; add 'expert' to its `over`",
    ),
    "rows after the groups": (
        "return torch.where(inside[:, None], rows, 0.0)",
        "return rows",
        "after two micro batches, the max 'up_input' is",
    ),
}


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_a_planted_fault_of_the_buffers_of_experts_is_caught(plant: Plant, name: str) -> None:
    old, new, message = OF_EXPERTS[name]
    plant("acme-delayed", old, new) if old else plant("acme-delayed")
    from acme_delayed import Delayed

    offer = Delayed(Delayed.Config(bits=30)).offer()[1]
    for weight in WEIGHTS:
        found = BufferTrial(offer, "Experts.product", torch.float32, "cpu", "here", weight).fault(compiles=False)
        assert message.replace("up_", f"{weight}_") in found
        assert bool(found) == bool(message)
