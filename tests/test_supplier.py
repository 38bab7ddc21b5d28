"""What fills a slot states about itself: a supplier is called as its function, and nothing is read from functions."""

from copy import deepcopy
from typing import Any

import pytest
import torch

from mplug import Supplier, statements_of
from mplug_nn import Attention, AttentionCore, Boundary, Collective, packed_heads_of, parts_of
from mplug_nn.attention import DOT_PRODUCT, scaled_dot_product
from mplug_nn.parts import PLAIN_PARTS


def test_a_call_of_a_supplier_is_a_call_of_its_function() -> None:
    def function(a: int, *, b: int) -> tuple[int, int]:
        return a, b

    supplier = Supplier(function, calls=("MLP.activation",))
    assert supplier(1, b=2) == (1, 2)
    assert statements_of(supplier).calls == ("MLP.activation",)


def test_a_plain_callable_states_nothing_whatever_attributes_it_has() -> None:
    def core(*given: Any) -> Any:
        return scaled_dot_product(*given)

    core.calls, core.parts, core.packed_heads = ("MLP.activation",), PLAIN_PARTS, object()  # type: ignore[attr-defined]
    assert statements_of(core).calls == ()
    assert packed_heads_of(core) is None
    with pytest.raises(ValueError, match="must not serve 'log-sum-exp'"):
        parts_of(core)
    assert parts_of(AttentionCore(core, parts=PLAIN_PARTS)) is PLAIN_PARTS


def test_a_collective_can_be_replaced_if_it_states_its_boundary() -> None:
    boundary = Boundary(torch.clone, torch.clone, torch.clone)
    contents = torch.clone, Collective(torch.clone), Collective(torch.clone, boundary=boundary)
    assert [statements_of(one).is_replaceable for one in contents] == [False, False, True]


def test_a_copy_of_a_block_has_the_same_content_in_its_slots() -> None:
    module = Attention(8, 2, 2, 4, bias=False, qk_norm=False, theta=None)
    copy = deepcopy(module)
    assert copy.core is module.core is DOT_PRODUCT
    assert copy.prepare_qkv is module.prepare_qkv
