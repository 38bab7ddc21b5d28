"""What offers and suppliers state about themselves, and the plugin that `kernel` makes of one function."""

import re
import textwrap
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mplug import Offer, Site, Supplier, kernel, statements_of
from mplug.model.slots.kernel import Kernel
from mplug_nn import (
    SLOTS,
    Attention,
    AttentionCore,
    AttentionInputs,
    AttentionSpec,
    Boundary,
    Collective,
    packed_heads_of,
    parts_of,
    scaled_dot_product,
)
from mplug_nn.attention import DOT_PRODUCT
from mplug_nn.parts import PLAIN_PARTS

DOCS = Path(__file__).parent.parent / "docs"


def site(*needs: str) -> Site:
    with torch.device("meta"):
        module = Attention(24, 2, 2, 12, bias=False, qk_norm=False, theta=None)
    return Site("blocks.*.attn", "Attention.core", module, "blocks.0.attn", frozenset(needs))


def run(device: str = "cuda", activations: str = "bfloat16", named: bool = True) -> Any:
    kinds = {"attention": "kernels/x"} if named else {}
    config = SimpleNamespace(trainer=SimpleNamespace(precision="of-the-run"), kernels=SimpleNamespace(kinds=kinds))
    return SimpleNamespace(device=device, precision=SimpleNamespace(activations=activations), config=config)


def refusing(*_: Any) -> str:
    return "its function refuses the site"


@pytest.mark.parametrize(
    ("data", "needs", "answer"),
    [
        ({}, (), True),
        ({}, ("window",), "it does not offer window"),
        ({"serves": {"window"}}, ("window",), True),
        ({"serves": {"window"}}, ("window", "unheard of"), "it does not offer unheard of"),
        ({"serves": {"window"}, "requires": frozenset({"window"})}, (), False),
        ({"serves": {"window"}, "requires": frozenset({"window"})}, ("window",), True),
        ({"optional": True}, ("window",), "it does not offer window"),
        ({"devices": ("cuda",)}, (), True),
        ({"devices": ("cpu",)}, (), "it needs a CPU, and this run is on cuda"),
        ({"dtypes": ("bfloat16", "float16")}, (), True),
        (
            {"dtypes": ("float16", "float32")},
            (),
            "it computes in fp16 or fp32, and trainer.precision=of-the-run computes in bfloat16",
        ),
        ({"chips": ("8.0+",)}, (), True),
        ({"chips": ("8.9", "9.0")}, (), True),
        (
            {"chips": ("8.0", "10.0+")},
            (),
            "it supports GPUs of compute capability 8.0 and 10.0 and newer, and this GPU has 9.0",
        ),
        ({"shapes": {"head_dim": range(4, 65, 4)}}, (), True),
        (
            {"shapes": {"spec.key_width": range(8, 129, 8)}},
            (),
            "it supports multiples of 8 from 8 to 128 as spec.key_width, and this site's spec.key_width is 12",
        ),
        ({"supports": refusing}, (), "its function refuses the site"),
        ({"supports": refusing}, ("window",), "it does not offer window"),
    ],
)
def test_an_offer_answers_by_its_data_and_then_by_its_function(
    data: dict[str, Any], needs: tuple[str, ...], answer: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    assert Offer({"Attention.core": print}, **data).answer(site(*needs), run()) == answer


def test_an_optional_offer_leaves_other_needs_to_plain_torch_and_one_for_a_gpu_refuses_the_cpu() -> None:
    offer = Offer({"Attention.core": print}, optional=True)
    assert offer.answer(site("window"), run(named=False)) is False
    assert offer.answer(site(), run(named=False)) is True
    offer = Offer({"Attention.core": print}, devices=("cuda",), chips=("9.0",))
    assert offer.answer(site(), run("cpu")) == "it needs a CUDA GPU, and this run is on the CPU"


def test_a_function_that_is_a_kernel_stays_a_function_and_has_a_plugin() -> None:
    @kernel("Norm.norm_residual", serves={"odd norm"}, captures="has not been tested")
    def half(x: Tensor) -> Tensor:
        """Half of it."""
        return x / 2

    assert half(torch.ones(1)).item() == 0.5
    assert half.plugin is half.plugin
    assert (half.plugin.__name__, half.plugin.__doc__) == ("half", "Half of it.")
    plugin = half.plugin(half.plugin.Config())
    (offer,) = plugin.offer()
    assert dict(offer.suppliers) == {"Norm.norm_residual": half.function}
    assert offer.serves == {"odd norm"}
    assert plugin.captures == "has not been tested"
    assert not hasattr(kernel("Norm.norm_residual")(half.function).plugin, "captures")


def test_the_kernel_in_the_docs_is_short_and_computes_attention() -> None:
    (block,) = re.findall(
        r"(    from mplug import kernel\n.*?)\n    \[project", (DOCS / "kernels.md").read_text(), re.DOTALL
    )
    source = textwrap.dedent(block)
    assert sum(bool(line.strip()) for line in source.splitlines()) <= 15
    names: dict[str, Any] = {}
    exec(source, names)
    ringo = names["ringo"]
    assert isinstance(ringo, Kernel)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, heads, 4, dtype=torch.float64, generator=generator) for heads in (4, 2, 2))
    for window in (None, 1, 3, 9):
        spec = AttentionSpec(0.5, 4, 4, window=window)
        torch.testing.assert_close(ringo(q, k, v, spec, AttentionInputs()), scaled_dot_product(q, k, v, spec))
    assert SLOTS["Attention.core"].kind == "attention"


def test_a_supplier_is_called_as_its_function_copied_as_itself_and_replaceable_if_it_states_its_boundary() -> None:
    def function(a: int, *, b: int) -> tuple[int, int]:
        return a, b

    supplier = Supplier(function, calls=("MLP.activation",))
    assert supplier(1, b=2) == (1, 2)
    assert statements_of(supplier).calls == ("MLP.activation",)
    boundary = Boundary(torch.clone, torch.clone, torch.clone)
    contents = torch.clone, Collective(torch.clone), Collective(torch.clone, boundary=boundary)
    assert [statements_of(one).is_replaceable for one in contents] == [False, False, True]
    module = Attention(8, 2, 2, 4, bias=False, qk_norm=False, theta=None)
    copy = deepcopy(module)
    assert copy.core is module.core is DOT_PRODUCT
    assert copy.prepare_qkv is module.prepare_qkv


def test_a_plain_callable_states_nothing_whatever_attributes_it_has() -> None:
    def core(*given: Any) -> Any:
        return scaled_dot_product(*given)

    core.calls, core.parts, core.packed_heads = ("MLP.activation",), PLAIN_PARTS, object()  # type: ignore[attr-defined]
    assert statements_of(core).calls == ()
    assert packed_heads_of(core) is None
    with pytest.raises(ValueError, match="must not serve 'log-sum-exp'"):
        parts_of(core)
    assert parts_of(AttentionCore(core, parts=PLAIN_PARTS)) is PLAIN_PARTS
