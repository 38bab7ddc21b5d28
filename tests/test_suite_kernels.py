"""The suite of kernels has teeth: a sound third-party kernel passes it, and every planted fault is caught by name."""

import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mplug_nn import SLOTS as ALL_SLOTS
from mplug_nn import AttentionInputs, AttentionSpec, Gemm
from mplug_nn.attention import prepare_qk, prepare_qkv, scaled_dot_product
from mplug_nn.experts import combine, compute, dispatch
from mplug_nn.loss import cross_entropy
from mplug_nn.mlp import activation
from mplug_nn.norm import norm_residual
from mplug_testing import Fault, KernelSuite
from mplug_testing.kernel_cases import cases
from mplug_testing.kernel_checks import Trial, own_dropout_fault

PACKAGE = Path(__file__).parent / "third_party" / "nova-ringo"
Suite: type[KernelSuite] = runpy.run_path(str(PACKAGE / "tests" / "test_ringo.py"))["TestRingo"]


class TestRingo(Suite):  # type: ignore[misc, valid-type]
    """The package as it is passes the whole suite."""

    @pytest.fixture(autouse=True)
    def planted(self, plant: Callable[..., None]) -> None:
        plant("nova-ringo")


class Planted(NamedTuple):
    """`old` becomes `new` in the package's source; `test`, called with `arguments`, must say `words`."""

    old: str
    new: str
    test: str
    arguments: tuple[str, ...]
    words: tuple[str, ...]


VALUES = "test_values_and_gradients_are_those_of_plain_torch"
OFFER = """        return [Offer({"Attention.core": partial(attention, block=self.config.block)}, supports)]"""
ONE_TYPE = """        from mplug_nn.mlp import activation

        def doubled(x, bias, kind):
            return 2 * activation(x, bias, kind)

        def in_bf16(site, run):
            return not site.needs and run.config.trainer.precision == "bf16"

        core = partial(attention, block=self.config.block)
        return [Offer({"Attention.core": core}, supports), Offer({"MLP.activation": doubled}, in_bf16)]"""
FAULTS = {
    "a query sees the next key": Planted(
        "positions[past] > positions[own, None]",
        "positions[past] > positions[own, None] + 1",
        "test_attention_is_causal",
        ("fp32",),
        ("Attention.core", "not causal", "before position 1 depend on later keys"),
    ),
    "backward gives later keys a gradient": Planted(
        "weights = (_scores(q, k, own, past, ctx.scale) - log_sum_exp[..., own, None]).exp()",
        "weights = (ctx.scale * q[..., own, :].to(wide) @ k[..., past, :].to(wide).mT"
        " - log_sum_exp[..., own, None]).exp()",
        "test_attention_is_causal",
        ("fp32",),
        ("backward is not causal", "give later k a gradient"),
    ),
    "its scale is its own": Planted(
        "scores = scale * (",
        "scores = q.shape[-1] ** -0.5 * (",
        VALUES,
        ("fp32",),
        ("a scale that is not 1/sqrt(head dim)", "the output has an error of"),
    ),
    "backward forgets the scale": Planted(
        "grad_scores = ctx.scale * weights",
        "grad_scores = weights",
        VALUES,
        ("fp32",),
        ("the gradient of q has an error of",),
    ),
    "query heads take the wrong KV head": Planted(
        "q = q.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)",
        "q = q.unflatten(2, (-1, groups)).permute(0, 3, 2, 1, 4)",
        VALUES,
        ("fp32",),
        ("grouped KV heads", "the output has an error of"),
    ),
    "query heads that share a KV head do not add up": Planted(
        "grad.sum(2, keepdim=True)",
        "grad[:, :, :1]",
        VALUES,
        ("fp32",),
        ("grouped KV heads", "the gradient of k has an error of"),
    ),
    "the last, shorter block of keys is left out": Planted(
        "for first in range(start, stop, block):",
        "for first in range(start, stop - stop % block or stop, block):",
        VALUES,
        ("fp32",),
        ("an odd length",),
    ),
    "the running sum is not scaled down when a block has a higher score": Planted(
        "total = shrink * total + weights.sum(-1)",
        "total = total + weights.sum(-1)",
        VALUES,
        ("fp32",),
        ("an odd length", "the output has an error of"),
    ),
    "exponentials overflow": Planted(
        "higher = torch.maximum(highest, scores.amax(-1))",
        "higher = torch.zeros_like(highest)",
        VALUES,
        ("fp32",),
        ("exponentials overflow", "the output has an error of nan"),
    ),
    "the highest score starts at 0": Planted(
        'float("-inf"), dtype=wide)',
        "0.0, dtype=wide)",
        VALUES,
        ("fp32",),
        ("exponentials vanish", "the output has an error of nan"),
    ),
    "half precision comes back as fp32": Planted(
        "return mixed.permute(0, 3, 1, 2, 4).flatten(2, 3)",
        "return mixed.permute(0, 3, 1, 2, 4).flatten(2, 3).float()",
        VALUES,
        ("bf16",),
        ("Attention.core", "bf16", "the output is torch.float32 instead of torch.bfloat16"),
    ),
    "it takes tensors for contiguous": Planted(
        "q = q.unflatten(2, (groups, -1))",
        "q = q.view(*q.shape[:2], -1).unflatten(2, (groups, -1, q.shape[3]))",
        "test_tensors_that_are_not_contiguous_give_the_same",
        ("fp32",),
        ("Attention.core", "not contiguous", "it raises RuntimeError"),
    ),
    "it writes to its input": Planted(
        "    groups = k.shape[2]\n",
        "    groups = k.shape[2]\n    q.mul_(1.5)\n",
        "test_inputs_are_left_as_they_were",
        ("fp32",),
        ("changes its input 'q' in place",),
    ),
    "it draws though nothing drops": Planted(
        "    groups = k.shape[2]\n",
        "    groups = k.shape[2]\n    torch.rand(())\n",
        "test_inputs_are_left_as_they_were",
        ("fp32",),
        ("draws from torch's generator", "ranks that hold copies would draw different numbers"),
    ),
    "its bits change from call to call": Planted(
        "ctx.scale, ctx.block = scale, block",
        "ctx.scale, ctx.block = scale, int(torch.randint(1, 6, ()))",
        "test_the_same_call_gives_the_same_bits",
        ("fp32",),
        ("other bits in the second call",),
    ),
    "it claims dropout, which it ignores": Planted(
        "if site.module.dropout > 0:",
        "if site.module.dropout > 1:",
        VALUES,
        ("fp32",),
        ("dropout by the samples' keys", "the output has an error of"),
    ),
    "it claims a log-sum-exp that it does not return": Planted(
        "block=self.config.block)}, supports)",
        'block=self.config.block)}, supports, serves={"log-sum-exp"})',
        "test_it_has_the_capabilities_that_it_grants",
        (),
        ("True", "'log-sum-exp'", "this suite cannot check it"),
    ),
    "it refuses everything": Planted(
        "if site.module.dropout > 0:",
        "if site.module.dropout >= 0:",
        VALUES,
        ("fp32",),
        ("so none can be checked", "it drops no attention weights"),
    ),
    "what it serves in one type only is wrong": Planted(
        OFFER,
        ONE_TYPE,
        VALUES,
        ("bf16",),
        ("MLP.activation with gelu, bf16", "the output has an error of"),
    ),
    "supports gives no reason": Planted(
        'return f"it drops no attention weights, and this site\'s dropout is {site.module.dropout}"',
        'return ""',
        "test_supports_is_a_pure_function_with_three_answers",
        (),
        ("supports returns ''", "True, False or a reason"),
    ),
    "supports raises": Planted(
        "if site.module.dropout > 0:",
        "if site.module.attention_dropout > 0:",
        "test_supports_is_a_pure_function_with_three_answers",
        (),
        ("supports", "it raises AttributeError", "attention_dropout"),
    ),
    "supports changes the model": Planted(
        "if site.module.dropout > 0:",
        "site.module.scale = site.module.scale * 2\n    if site.module.dropout > 0:",
        "test_supports_is_a_pure_function_with_three_answers",
        (),
        ("supports is not pure", "changes spec"),
    ),
    "a slot is misspelt": Planted(
        '{"Attention.core": partial',
        '{"Attention.cores": partial',
        "test_it_offers_suppliers_of_slots",
        (),
        ("offers a supplier for 'Attention.cores'", "did you mean 'Attention.core'"),
    ),
    "every site gets a callable of its own": Planted(
        OFFER,
        """        def own(number):
            core = partial(attention, block=self.config.block)
            return Offer({"Attention.core": core}, lambda site, run: f".{number}." in site.name and supports(site, run))

        return [own(number) for number in range(4)]""",
        "test_all_sites_of_a_role_share_one_callable",
        (),
        ("'blocks.*.attn' have 4 callables in Attention.core", "share one"),
    ),
    "a supplier brings a parameter along": Planted(
        OFFER,
        """        import torch

        temperature = torch.nn.Parameter(torch.ones(()))

        def core(q, k, v, spec, inputs):
            return attention(q * temperature, k, v, spec, inputs, block=self.config.block)

        return [Offer({"Attention.core": core}, supports)]""",
        "test_its_suppliers_own_no_parameter_and_no_module",
        (),
        ("the supplier of Attention.core owns a parameter",),
    ),
    "it reads a tensor's value on the host": Planted(
        "    groups = k.shape[2]\n",
        "    groups = k.shape[2]\n    if q.isnan().any():\n        raise ValueError\n",
        "test_it_traces_into_one_graph",
        (),
        ("Attention.core", "does not trace into one graph"),
    ),
    "a run that names it does not get it": Planted(
        "if site.module.dropout > 0:",
        "if site.module.out.weight.shape[0] == 32:\n        return False\n    if site.module.dropout > 0:",
        "test_a_run_that_names_it_uses_it_and_is_the_run_in_plain_torch",
        (),
        ("fills no slot of a run that names it", "plain torch"),
    ),
    "it trains otherwise than plain torch": Planted(
        "    groups = k.shape[2]\n",
        "    groups = k.shape[2]\n    q = q * 1.01\n",
        "test_a_run_that_names_it_uses_it_and_is_the_run_in_plain_torch",
        (),
        ("in a tiny run with 'ringo' instead of plain torch", "has an error of"),
    ),
}


@pytest.mark.parametrize("planted", FAULTS.values(), ids=FAULTS)
def test_the_suite_catches(planted: Planted, plant: Callable[..., None]) -> None:
    plant("nova-ringo", planted.old, planted.new)
    with pytest.raises(Fault) as caught:
        getattr(Suite(), planted.test)(*planted.arguments)
    assert [word for word in planted.words if word not in str(caught.value)] == [], str(caught.value)


def test_a_slot_that_is_served_in_one_type_only_is_no_fault_of_the_others(plant: Callable[..., None]) -> None:
    plant("nova-ringo", OFFER, ONE_TYPE)
    getattr(Suite(), VALUES)("fp32")


# The slots that the package does not fill: a supplier tried on the cases of each.


def first_fault(slot: str, supplier: Any, dtype: torch.dtype, check: Callable[[Trial], str]) -> str:
    """What a check finds wrong with a supplier, in the first case in which it finds anything."""
    for case in cases():
        if slot in case.slots:
            found = check(Trial(case, {**case.plain, slot: supplier}, dtype, "cpu", f"{slot} with {case.name}"))
            if found:
                return found
    return ""


def plain_of(slot: str) -> Any:
    return next(case.plain[slot] for case in cases() if slot in case.slots)


CHECKS: dict[str, Callable[[Trial], str]] = {
    "values": lambda trial: trial.values_fault(1.0),
    "strides": lambda trial: trial.strided_fault(2.0),
    "in place": Trial.in_place_fault,
    "repeated": Trial.repeated_fault,
}


BF16 = {"Attention.core", "Linear.gemm", "Loss.cross_entropy"}
"""The slots that the quick tests check in bf16 as well: attention, a sink of gradients, and a sum."""
SLOTS = [(slot, torch.float32) for slot in ALL_SLOTS] + [
    pytest.param(slot, torch.bfloat16, marks=[] if slot in BF16 else pytest.mark.wide("suites")) for slot in ALL_SLOTS
]


@pytest.mark.parametrize(("slot", "dtype"), SLOTS)
def test_plain_torch_passes_every_check_of_every_slot(slot: str, dtype: torch.dtype) -> None:
    assert {name: first_fault(slot, plain_of(slot), dtype, check) for name, check in CHECKS.items()} == dict.fromkeys(
        CHECKS, ""
    )


@pytest.mark.parametrize("slot", ["Linear.gemm", "Embedding.lookup", "Dropout.rows"])
def test_plain_torch_traces_into_one_graph(slot: str) -> None:
    assert first_fault(slot, plain_of(slot), torch.float32, lambda trial: trial.compiled_fault(1.0)) == ""


def overwriting(grad_y: Tensor, x: Tensor, main_grad: Tensor | None) -> Tensor | None:
    grad_weight = grad_y.flatten(0, -2).T @ x.flatten(0, -2)
    if main_grad is None:
        return grad_weight
    main_grad.copy_(grad_weight)
    return None


def returning_too(grad_y: Tensor, x: Tensor, main_grad: Tensor | None) -> Tensor | None:
    grad_weight = grad_y.flatten(0, -2).T @ x.flatten(0, -2)
    if main_grad is not None:
        main_grad.add_(grad_weight)
    return grad_weight


def swapped_swiglu(x: Tensor, bias: Tensor | None, kind: Any) -> Tensor:
    return activation(x.roll(x.shape[-1] // 2, -1) if kind == "swiglu" else x, bias, kind)


def norm_of_x_alone(x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    return norm_residual(x, None, *rest)[0], x if residual is None else x + residual


def mean_loss(hidden: Tensor, project: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    loss, count = cross_entropy(hidden, project, labels)
    return loss / count.clamp(min=1), count


def counting_everything(hidden: Tensor, project: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    return cross_entropy(hidden, project, labels)[0], torch.tensor(labels.numel())


def without_norm(q: Tensor, k: Tensor, positions: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return prepare_qk(q, k, positions, None, None, *rest[2:])


def positions_from_zero(q: Tensor, k: Tensor, positions: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return prepare_qk(q, k, positions - positions[:, :1], *rest)


def values_without_gradient(*packed: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = prepare_qkv(*packed)
    return q, k, v.detach()


def as_many_keys_as_queries(heads: Tensor, h: int, g: int, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k = rest[-1](heads[:, :, :h], heads[:, :, h : 2 * h], *rest[:-1])
    return q, k, heads[:, :, -g:]


def keys_normed_as_queries(
    heads: Tensor, h: int, g: int, positions: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return prepare_qkv(heads, h, g, positions, q_weight, q_weight, *rest)


def gradients_not_turned_back(heads: Tensor, h: int, g: int, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = prepare_qkv(heads.detach(), h, g, *rest)
    straight = heads - heads.detach()  # 0, with a gradient of 1
    return q + straight[:, :, :h], k + straight[:, :, h : h + g], v + straight[:, :, h + g :]


def positions_of_the_first_sample(heads: Tensor, h: int, g: int, positions: Tensor, *rest: Any) -> Any:
    return prepare_qkv(heads, h, g, positions[:1], *rest)


def counting_dropped_choices(x: Tensor, chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Any]:
    rows, counts, route = dispatch(x, chosen, num_experts)
    return rows, counts + torch.tensor([*[0] * (num_experts - 1), int((chosen == num_experts).sum())]), route


def unweighted(rows: Tensor, gates: Tensor, route: Any) -> Tensor:
    return combine(rows, (gates != 0).to(gates.dtype), route)


def first_expert_for_all(rows: Tensor, counts: Tensor, *rest: Any) -> Tensor:
    return compute(rows, torch.zeros_like(counts).index_fill(0, torch.tensor([0]), int(counts.sum())), *rest)


def slopes_of_local_heads(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    local = inputs._replace(first_head=0, num_heads=q.shape[2])
    return scaled_dot_product(q, k, v, spec, local if spec.bias else inputs)


def sinks_without_gradient(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    sinks = None if inputs.sinks is None else inputs.sinks.detach()
    return scaled_dot_product(q, k, v, spec, inputs._replace(sinks=sinks))


def window_of_one_more(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    wider = None if spec.window is None else spec.window + 1
    return scaled_dot_product(q, k, v, replace(spec, window=wider), inputs)


def without_a_cap(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
    return scaled_dot_product(q, k, v, replace(spec, soft_cap=None), inputs)


SLOT_FAULTS = {
    "ALiBi's slopes are those of local heads": (
        "Attention.core",
        slopes_of_local_heads,
        "with ALiBi: the output has an error of",
    ),
    "attention sinks are not trained": (
        "Attention.core",
        sinks_without_gradient,
        "with attention sinks: the gradient of sinks is missing",
    ),
    "a window has one position more": (
        "Attention.core",
        window_of_one_more,
        "with a window: the output has an error of",
    ),
    "scores are not capped": ("Attention.core", without_a_cap, "with a soft cap: the output has an error of"),
    "dropped choices are counted": (
        "Experts.dispatch",
        counting_dropped_choices,
        "choices that were dropped: the counts is wrong",
    ),
    "gates weigh nothing": (
        "Experts.combine",
        unweighted,
        "each expert chosen: the tokens put together has an error of",
    ),
    "the first expert serves all rows": ("Experts.compute", first_expert_for_all, "gelu: the rows has an error of"),
    "a rank counts itself twice": ("Router.summed", lambda values, _: 2 * values, "the only rank's sum is wrong"),
    "weight gradients overwrite the sink": (
        "Linear.gemm",
        Gemm(wgrad=overwriting),
        "the gradient sink has an error of",
    ),
    "weight gradients come back too": ("Linear.gemm", Gemm(wgrad=returning_too), "would count twice"),
    "input gradients of odd widths are left out": (
        "Linear.gemm",
        Gemm(dgrad=lambda grad_y, weight: grad_y @ weight * (weight.shape[1] % 2 == 0)),
        "odd widths: the gradient of x has an error of",
    ),
    "a collective without a group is no identity": ("Linear.gather", lambda x: x * 1.01, "the output has an error of"),
    "a scatter cuts the gradient off": ("Linear.scatter", lambda y: y.detach(), "the gradient of x is missing"),
    "the residual is not added": (
        "Norm.norm_residual",
        norm_of_x_alone,
        "with a residual and a bias: the normed sum has an error of",
    ),
    "gate and up are swapped": ("MLP.activation", swapped_swiglu, "swiglu: the output has an error of"),
    "a table has no gradient": (
        "Embedding.lookup",
        lambda indices, weight: weight.detach()[indices],
        "the gradient of weight is missing",
    ),
    "rows begin at one": ("Dropout.rows", lambda positions: positions + 1, "the numbering of rows is wrong"),
    "the rows of a stream are scaled": ("Join.gather", lambda rows: rows * 1.01, "the output has an error of"),
    "the places of rows are moved": ("Join.positions", lambda places: places.roll(1, 1), "the output is wrong"),
    "the loss is a mean": ("Loss.cross_entropy", mean_loss, "the loss has an error of"),
    "ignored labels count": (
        "Loss.cross_entropy",
        counting_everything,
        "ignored labels: the number of targets is wrong",
    ),
    "there is no QK-norm": ("Attention.prepare_qk", without_norm, "with QK-norm: the prepared q has an error of"),
    "positions begin at zero": (
        "Attention.prepare_qk",
        positions_from_zero,
        "with positions of each sample: the prepared q has an error of",
    ),
    "the packed gradient has no part of the values": (
        "Attention.prepare_qkv",
        values_without_gradient,
        "with rotary positions: the gradient of packed heads has an error of",
    ),
    "there are as many keys as queries": (
        "Attention.prepare_qkv",
        as_many_keys_as_queries,
        "with grouped KV heads: the prepared k has shape (2, 6, 4, 8) instead of (2, 6, 2, 8)",
    ),
    "keys are normalised by the queries' weights": (
        "Attention.prepare_qkv",
        keys_normed_as_queries,
        "with QK-norm: the prepared k has an error of",
    ),
    "gradients are not turned back": (
        "Attention.prepare_qkv",
        gradients_not_turned_back,
        "with rotary positions: the gradient of packed heads has an error of",
    ),
    "all samples have the positions of the first": (
        "Attention.prepare_qkv",
        positions_of_the_first_sample,
        "with positions of each sample: the prepared q has an error of",
    ),
}


@pytest.mark.parametrize(("slot", "supplier", "words"), SLOT_FAULTS.values(), ids=SLOT_FAULTS)
def test_the_cases_of_a_slot_catch(slot: str, supplier: Any, words: str) -> None:
    assert words in first_fault(slot, supplier, torch.float32, lambda trial: trial.values_fault(4.0))


@pytest.mark.parametrize(
    ("kept", "scaled_by", "words"),
    [
        (0.75, 1 / 0.75, ""),
        (0.75, 1.0, "not scaled by"),
        (0.6, 1 / 0.75, "it keeps 59"),
        (1.0, 1 / 0.75, "it keeps 100"),
    ],
)
def test_a_dropout_of_its_own_is_judged_by_how_often_it_drops(kept: float, scaled_by: float, words: str) -> None:
    torch.manual_seed(0)
    found = own_dropout_fault(dropping(lambda shape: torch.rand(shape) < kept, scaled_by), 0.25, "cpu")
    assert words in found
    assert bool(words) == bool(found)


def dropping(drawn: Callable[[torch.Size], Tensor], scaled_by: float, again: bool = False) -> Callable[..., Tensor]:
    """Attention that drops by a mask of its own; with `again`, backward draws another."""

    class Mix(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weights: Tensor, v: Tensor) -> Tensor:
            ctx.save_for_backward(weights, v)
            return mixed(weights * drawn(weights.shape) * scaled_by, v)

        @staticmethod
        def backward(ctx: Any, upstream: Tensor) -> Any:
            weights, v = ctx.saved_tensors
            with torch.enable_grad():
                leaf = v.detach().requires_grad_()
                mixed(weights * drawn(weights.shape) * scaled_by, leaf).backward(upstream)
            return None, leaf.grad

    def core(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        ones = torch.eye(k.shape[1])[None, :, None].expand(*k.shape[:3], -1)
        weights = scaled_dot_product(q, k, ones, replace(spec, dropout=0.0), inputs)
        if not spec.dropout:
            return mixed(weights, v)
        if again:
            output: Tensor = Mix.apply(weights, v)
            return output
        return mixed(weights * drawn(weights.shape) * scaled_by, v)

    return core


def mixed(weights: Tensor, v: Tensor) -> Tensor:
    """Weights [B, S, H, T], values [B, T, H, K] -> [B, S, H, K]."""
    return torch.einsum("bsht,bthk->bshk", weights, v)


OWN_GENERATOR = torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("drawn", "again", "words"),
    [
        (lambda shape: torch.rand(shape, generator=OWN_GENERATOR), False, "draw from torch's default generators"),
        (
            lambda shape: torch.rand(shape, generator=torch.Generator().manual_seed(0)),
            False,
            "different seeds of torch.manual_seed give the same mask",
        ),
        (torch.rand, True, "backward drops other weights than forward"),
    ],
    ids=["another generator", "one mask for ever", "another mask in backward"],
)
def test_a_dropout_of_its_own_is_judged_by_where_it_comes_from(drawn: Any, again: bool, words: str) -> None:
    """The host seeds torch's generators before every unit, and nothing else."""
    torch.manual_seed(0)
    core = dropping(lambda shape: drawn(shape) < 0.75, 1 / 0.75, again)
    assert words in own_dropout_fault(core, 0.25, "cpu")
