"""Open lists: names of activations, norms, rotary scalings and router scores, and what each entry computes."""

import cmath
import math
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from distributions import installed
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mplug import Offer, Run, Site, UsageError
from mplug.registry.entry_points import OPEN_LISTS, Registry
from mplug.registry.open_lists import _added
from mplug.training.schedule import learning_rate
from mplug_nn import MLP, SLOTS, Attention, Experts, Gating, MixtureOfExperts, Norm, Rotary, Router
from mplug_nn.activations import ACTIVATIONS
from mplug_nn.experts import add_of_group
from mplug_nn.norm_functions import NORMS
from mplug_nn.open_lists import SCORES
from mplug_nn.scores import SCORES as SCORED
from mplug_nn.turning import rotate
from mplug_testing.harness import tiny_config

Install = Callable[[str, str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution with one module and entry points."""

    def prepended(name: str, points: str, code: str = "") -> None:
        monkeypatch.syspath_prepend(installed(tmp_path, name, points, code))
        _added.cache_clear()

    yield prepended
    _added.cache_clear()


XIELU = """
import torch
from mplug_nn import ActivationFunction
XIELU = ActivationFunction(lambda x: torch.where(x > 0, x * x + x, x.expm1()))
"""
ADDED = "[mplug.activations]\nxielu = acme_xielu:XIELU\n"


def config(family: str, **fields: Any) -> Any:
    plugin = Registry().load(Registry().find("models", family))
    return plugin.Config(**fields)


def test_a_distribution_adds_an_activation_that_a_config_names(install: Install) -> None:
    with pytest.raises(ValueError, match="no activation is named 'xielu'"):
        config("llama", activation="xielu")
    install("acme_xielu", ADDED, XIELU)
    assert config("llama", activation="xielu").activation == "xielu"
    mlp, x = MLP(8, 16, "xielu", bias=False), torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    assert mlp.up.weight.shape == (16, 8)
    torch.testing.assert_close(mlp.activate(x), torch.where(x > 0, x * x + x, x.exp() - 1))
    assert mlp.needs("MLP.activation", ()) == {"xielu activation"}
    assert not [one for one in Registry().misplaced() if one.distribution == "acme_xielu"]


def test_a_name_that_two_distributions_claim_one_of_the_host_and_another_type_are_refused(install: Install) -> None:
    install("acme_xielu", ADDED, XIELU)
    install("zenith_xielu", ADDED)
    with pytest.raises(ValueError, match=r"'xielu' is claimed by (acme|zenith)_xielu and (acme|zenith)_xielu"):
        MLP(8, 16, "xielu", bias=False)
    install("acme_plain", "[mplug.activations]\nplain = acme_plain:relu\n", "def relu(x): return x")
    with pytest.raises(ValueError, match=r"'plain' is <function.*must name a mplug_nn\.ActivationFunction"):
        MLP(8, 16, "plain", bias=False)
    install("rude", "[mplug.norms]\nrmsnorm = rude:NORM\n")
    with pytest.raises(ValueError, match="the norm 'rmsnorm' is claimed by mplug-nn and rude"):
        Norm(8, "rmsnorm")


@pytest.mark.parametrize(
    ("names", "entry", "message"),
    [
        (ACTIVATIONS, "lambda x: x.relu() / (1 + x.relu().mean(dim=-1, keepdim=True))", "is not element-wise"),
        (ACTIVATIONS, "lambda gate, up: gate.softmax(dim=-1) * up, gated=True", "is not element-wise"),
        (ACTIVATIONS, "lambda x: x * torch.rand_like(x)", "is not element-wise"),
        (ACTIVATIONS, "lambda x: x.half_relu()", "fails for fp64 numbers on the CPU: AttributeError"),
        (NORMS, "lambda x, weight, bias, eps: weight * x / (x.std() + eps)", "does not compute each row alone"),
        (SCORED, "lambda x: x.exp() / x.exp().sum(), lambda x: x / x.sum(-1, True)", "`judged` of a token from other"),
        (SCORED, "torch.sigmoid, lambda x: x / x.sum()", "`probabilities` of a token from other tokens"),
        (SCORED, "torch.sigmoid, lambda x: x", "returns `probabilities` whose sum is not 1"),
    ],
)
def test_an_entry_that_a_layout_would_change_is_refused(
    names: Any, entry: str, message: str, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "_loaded", {})
    sys.modules.pop("acme_one", None)
    code = f"import torch\nfrom mplug_nn import {names.expected.__name__}\nONE = {names.expected.__name__}({entry})\n"
    install("acme_one", f"[{names.list.group}]\none = acme_one:ONE\n", code)
    with torch.device("meta"), pytest.raises(ValueError, match=f"the {names.list.noun} 'one' .*{message}"):
        names.load("one")


def test_every_entry_of_every_installed_list_loads() -> None:
    lists = {one.name: EntryPoint(one.name, one.target, "").load() for one in Registry().table(OPEN_LISTS)}
    assert set(lists) >= {"activations", "norms", "rotary_scalings", "router_scores"}
    for group, one in lists.items():
        assert one.group == f"mplug.{group}"
        assert all(one.load(name) is not None for name in one.names()), one.noun


def test_a_distribution_opens_a_list_and_another_adds_an_entry_to_it(install: Install) -> None:
    added = "[mplug.windows]\nhann = zenith_hann:HANN\n"
    install("zenith_hann", added, "HANN = 'the window'")
    (lost,) = [one for one in Registry().misplaced() if one.distribution == "zenith_hann"]
    assert "is in the group 'mplug.windows', which mplug" in str(lost)
    code = "from mplug import OpenList\nWINDOWS = OpenList('window function', 'mplug.windows', {}, 'acme-windows')\n"
    install("acme_windows", "[mplug.open_lists]\nwindows = acme_windows:WINDOWS\n", code)
    assert not [one for one in Registry().misplaced() if one.distribution in ("zenith_hann", "acme_windows")]
    (opened,) = [one for one in Registry().table(OPEN_LISTS) if one.name == "windows"]
    windows = EntryPoint("windows", opened.target, "").load()
    assert windows.names() == ["hann"]
    assert windows.load("hann") == "the window"
    with pytest.raises(ValueError, match="no window function is named 'han'; did you mean 'hann'"):
        windows.check("han")


# Kernels.


def site(module: Any, slot: str) -> Site:
    return Site("blocks.*.part", slot, module, "blocks.0.part", module.needs(slot, ()))


NEW = [
    (Norm(8, "offset_rmsnorm"), "Norm.norm_residual", "offset_rmsnorm norm"),
    (MLP(8, 16, "relu2", bias=False), "MLP.activation", "relu2 activation"),
    (MLP(8, 16, "relu2", bias=False), "MLP.core", "relu2 activation"),
    (Experts(8, 16, 2, "geglu"), "Experts.compute", "geglu activation"),
    (Experts(8, 16, 2, "swiglu", bias=True), "Experts.compute", "expert bias"),
]


@pytest.mark.parametrize(("module", "slot", "need"), NEW)
def test_a_kernel_that_does_not_know_an_entry_is_refused(module: Any, slot: str, need: str) -> None:
    run: Run = None  # type: ignore[assignment]
    assert need in site(module, slot).needs
    assert Offer({slot: print}).answer(site(module, slot), run) == f"it does not offer {need}"
    assert Offer({slot: print}, serves={need}).answer(site(module, slot), run) is True


def test_plain_torch_offers_every_entry_and_nothing_else() -> None:
    for module, slot, need in NEW[:2]:
        serves = SLOTS[slot].serves
        assert not site(module, slot).lacking(serves)
        assert Site("", slot, module, "", frozenset({need, "fp3"})).lacking(serves) == "it does not offer fp3"


def attention(rotary: Rotary) -> Attention:
    return Attention(32, 4, 2, 8, bias=False, qk_norm=False, theta=rotary)


def test_rotary_positions_beyond_the_plain_ones_are_needs() -> None:
    scaled = Rotary(1e4, "linear", (("factor", 2.0),))
    assert attention(Rotary(1e4)).theta == 1e4
    for rotary, need in (
        (scaled, "scaled rotary"),
        (Rotary(1e4, width=4), "partial rotary"),
        (Rotary(1e4, interleaved=True), "interleaved rotary"),
    ):
        for slot in ("Attention.prepare_qk", "Attention.prepare_qkv"):
            assert attention(rotary).needs(slot, ()) == {need}
        assert not attention(rotary).needs("Attention.core", ())


# What the entries compute.


def test_activations_are_their_formulas() -> None:
    a, b = torch.randn(2, 500, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 5
    gate = a.clamp(max=7.0)
    formulas = {
        "relu2": torch.where(a > 0, a * a, 0.0),
        "geglu": a * 0.5 * (1 + torch.erf(a / math.sqrt(2))) * b,
        "geglu_tanh": a * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))) * b,
        "clamped_swiglu": (b.clamp(-7.0, 7.0) + 1) * gate / (1 + torch.exp(-1.702 * gate)),
    }
    for name, expected in formulas.items():
        function = ACTIVATIONS[name]
        torch.testing.assert_close(function.compute(a, b) if function.gated else function.compute(a), expected)


def test_norms_with_an_offset_scale_by_one_plus_the_weight() -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((4, 16), (16,), (16,)))
    for plain in ("layernorm", "rmsnorm"):
        expected = NORMS[plain].compute(x, 1 + weight, bias, 1e-5)
        torch.testing.assert_close(NORMS[f"offset_{plain}"].compute(x, weight, bias, 1e-5), expected)
    # In bf16, 1 + 0.001 would be 1: the sum is made in fp32.
    small = torch.full((16,), 1e-3, dtype=torch.bfloat16)
    wide = (x.bfloat16().double() * torch.rsqrt(x.bfloat16().double().square().mean(-1, keepdim=True))) * (1 + 1e-3)
    found = NORMS["offset_rmsnorm"].compute(x.bfloat16(), small, None, 0.0)
    assert found.dtype == torch.bfloat16
    assert (found.double() - wide).abs().max() <= 2**-8 * wide.abs().max()
    assert Norm(8, "offset_rmsnorm").initial == 0.0


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [4, 8])
def test_rotary_positions_turn_the_pairs_as_complex_numbers(interleaved: bool, width: int) -> None:
    x = torch.randn(1, 3, 1, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    rotary = Rotary(100.0, "linear", (("factor", 2.0),), width, interleaved)
    found = rotate(x, torch.tensor([[0, 3, 7]]), rotary.turns(8))  # type: ignore[arg-type]
    for number, position in enumerate((0, 3, 7)):
        own = x[0, number, 0]
        expected = own.clone()
        for pair in range(width // 2):
            i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + width // 2)
            angle = position * 100.0 ** (-2 * pair / width) / 2
            turned = complex(own[i], own[j]) * cmath.exp(1j * angle)
            expected[i], expected[j] = turned.real, turned.imag
        torch.testing.assert_close(found[0, number, 0], expected)


def test_the_softmax_of_chosen_experts_knows_no_other_expert() -> None:
    logits = torch.tensor([[3.0, -1.0, 2.0, 0.5]])
    choice = Gating(4, 2, "softmax_of_chosen", normalize=False)
    scores = choice.scores(logits)
    chosen = choice.chosen(scores)
    assert chosen.tolist() == [[0, 2]]
    high = 1 / (1 + math.exp(-1.0))
    torch.testing.assert_close(choice.gates(scores, chosen), torch.tensor([[high, 1 - high]]))
    torch.testing.assert_close(choice.probabilities(scores), logits.softmax(-1))
    assert set(SCORES.names()) >= {"softmax", "sigmoid", "softmax_of_chosen"}


def test_the_best_score_of_a_group_can_decide_alone() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5]])
    assert Gating(4, 1, num_groups=2, top_groups=1, group_best=1).chosen(scores).tolist() == [[0]]
    assert Gating(4, 1, num_groups=2, top_groups=1).chosen(scores).tolist() == [[2]]


def test_rows_behind_the_last_expert_reach_no_bias() -> None:
    rows, bias = torch.zeros(6, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], requires_grad=True)
    found = add_of_group(rows, torch.tensor([1, 0, 3]), bias)
    assert found.tolist() == [[1, 2], [5, 6], [5, 6], [5, 6], [0, 0], [0, 0]]
    found.backward(torch.tensor([1.0, 1, 1, 1, float("nan"), float("nan")])[:, None].expand(6, 2))
    assert bias.grad is not None
    assert bias.grad.tolist() == [[1, 1], [0, 0], [3, 3]]


def test_rows_whose_number_depends_on_values_get_biases_without_memory() -> None:
    """Schedules that split backward look for products so, with rows from other ranks."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        rows = torch.zeros(6, 2)[torch.ones(6).nonzero().flatten()]
        found = add_of_group(rows, torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2))
    assert found.shape == rows.shape
    assert isinstance(found.shape[0], torch.SymInt)


def test_a_wrapped_computation_of_biased_experts_is_the_unwrapped_one() -> None:
    """A wrap of `Experts.compute` calls the wide slot, which then gets the biases."""
    generator = torch.Generator().manual_seed(5)
    router = Router(8, Gating(3, 2, "softmax_of_chosen", normalize=False), logit_bias=True)
    moe = MixtureOfExperts(router, 8, 6, "clamped_swiglu", bias=True)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x, positions, keys = torch.randn(2, 5, 8, generator=generator), torch.arange(5)[None], torch.zeros(2).long()
    expected = moe(x, positions, keys, None)
    inner, seen = moe.experts.compute, list[int]()

    def wrapped(*arguments: Any) -> Tensor:
        seen.append(len(arguments))
        return inner(*arguments)

    moe.experts.compute = wrapped  # type: ignore[assignment]
    torch.testing.assert_close(moe(x, positions, keys, None), expected)
    assert seen == [7]


HALVES = """
def halves(step, settings):
    return settings.peak * 0.5 ** (step - settings.warmup_steps)
"""
BELOW = "[mplug.learning_rates]\nhalves = acme_halves:halves\n"


def test_a_distribution_adds_a_learning_rate_schedule_that_a_config_names(install: Install) -> None:
    named = {"schedule.name": "halves", "schedule.warmup_steps": 2, "schedule.min_lr": 0.1, "optimizer.lr": 1.0}
    with pytest.raises(UsageError, match=r"schedule\.name .*no learning rate schedule is named 'halves'"):
        tiny_config(named)
    install("acme_halves", BELOW, HALVES)
    section = tiny_config(named).schedule
    rates = [learning_rate(step, 1.0, section, 100) for step in range(1, 8)]
    assert rates == [0.5, 1.0, 0.5, 0.25, 0.125, 0.1, 0.1]


ENDS = """
from mplug import ends_with_run


@ends_with_run
def ends(step, settings):
    return settings.between(1 - settings.at_the_end(step))
"""


def test_a_decay_that_a_distribution_declares_to_end_with_the_run_is_at_most_as_long(install: Install) -> None:
    install("acme_ends", "[mplug.learning_rates]\nends = acme_ends:ends\n", ENDS)
    lengths = {"schedule.warmup_steps": 0, "schedule.min_lr": 0.0, "trainer.steps": 5}
    named = {"schedule.name": "ends", "schedule.decay_steps": 5, **lengths}
    section = tiny_config(named).schedule
    assert [learning_rate(step, 1.0, section, 5) for step in (1, 3, 5)] == pytest.approx([0.8, 0.4, 0.0])
    with pytest.raises(UsageError, match=r"schedule\.decay_steps .*decay of 6 steps is longer than the run"):
        tiny_config({**named, "schedule.decay_steps": 6})


def test_a_learning_rate_schedule_that_two_claim_or_that_does_not_load_is_refused_before_the_run(
    install: Install,
) -> None:
    install(
        "acme_falls",
        "[mplug.learning_rates]\nfalls = acme_falls:falls\ncosine = acme_falls:falls\n",
        "import acme_lost",
    )
    with pytest.raises(UsageError, match=r"schedule\.name .*'cosine' is claimed by mplug and acme_falls"):
        tiny_config({"schedule.name": "cosine"})
    with pytest.raises(UsageError, match=r"schedule\.name .*'falls' cannot be loaded: No module named 'acme_lost'"):
        tiny_config({"schedule.name": "falls"})
