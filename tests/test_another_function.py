"""Attention cores that are no softmax attention: a stranger's model and kernel, their suites, and who is refused."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from mplug import UsageError
from mplug.model.build import build_model, unmet_reasons
from mplug_estimates import alternatives
from mplug_testing import Fault, KernelSuite, ModelSuite
from mplug_testing.harness import tiny_run

PACKAGE = "nova-linear"
MODULE = runpy.run_path(str(Path(__file__).parent / "third_party" / PACKAGE / "tests" / "test_linear.py"))
KernelsSuite: type[KernelSuite] = MODULE["TestChunked"]
ModelsSuite: type[ModelSuite] = MODULE["TestLinearTransformer"]
TINY: dict[str, Any] = {"model.name": "linear", **MODULE["TINY"]}

Plant = Callable[..., None]
Cli = Callable[..., Any]


@pytest.mark.wide(
    "suites",
    quick=[
        "test_values_and_gradients_are_those_of_plain_torch",
        "test_another_function_has_a_name_and_a_reference",
        "test_it_refuses_sites_that_ask_for_another_function",
        "test_its_reference_is_a_core",
        "test_a_run_that_names_it_uses_it_and_is_the_run_in_plain_torch",
    ],
)
class TestChunked(KernelsSuite):  # type: ignore[misc, valid-type]
    """The kernel as it is passes the whole suite."""

    test_it_traces_into_one_graph = pytest.mark.wide("suites")(KernelsSuite.test_it_traces_into_one_graph)

    @pytest.fixture(autouse=True)
    def planted(self, plant: Plant) -> None:
        plant(PACKAGE)


@pytest.mark.wide("suites")
def test_the_package_as_it_is_passes_its_own_tests(own_tests: Callable[..., str]) -> None:
    skipped = [line for line in own_tests(PACKAGE, "-rs").splitlines() if line.startswith("SKIPPED")]
    expected = (
        "draws no dropout mask itself",
        "does not state that its steps can be replayed",
        "no whole product",
        "declares no buffers",
        "computes no attention from packed heads",
        "has no copies of weights",
        "is refused",
        "has no external names",
        "is sampled from without a cache",
    )
    assert all(any(words in line for words in expected) for line in skipped), skipped


class Planted(NamedTuple):
    """`old` becomes `new` in the package's source; a suite's `test`, called with `arguments`, must say `words`."""

    old: str
    new: str
    test: str
    words: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    suite: Any = KernelsSuite


VALUES = "test_values_and_gradients_are_those_of_plain_torch"
FLOPS = "test_its_flops_are_those_of_its_matrix_products"
ANOTHER = '        return f"it computes {LINEAR}, and this site asks for another function"'
FAULTS = {
    "the kernel says True to softmax attention": Planted(
        ANOTHER,
        "        return not site.needs",
        "test_it_refuses_sites_that_ask_for_another_function",
        ("supports returns True for Attention.core", "does not need 'linear attention'", "require 'linear attention'"),
    ),
    "the kernel forgets the normaliser": Planted(
        "output = summed[..., :-1] / summed[..., -1:]",
        "output = summed[..., :-1]",
        VALUES,
        ("Attention.core with as many KV heads as query heads, fp32: the output has an error of",),
        ("fp32",),
    ),
    "a small feature is rounded away": Planted(
        "torch.where(x > 0, x + 1, x.clamp(max=0).exp())",
        "torch.nn.functional.elu(x) + 1",
        VALUES,
        ("scores whose exponentials vanish", "the output has an error of"),
        ("fp32",),
    ),
    "a chunk sees the sums of its own keys": Planted(
        "F.pad(sums[:, :, :, :-1], (0, 0, 0, 0, 1, 0)).cumsum(3)",
        "sums.cumsum(3)",
        "test_attention_is_causal",
        ("not causal",),
        ("fp32",),
    ),
    "the model computes what the kernel does not": Planted(
        "weights = weights / weights.sum(-1, keepdim=True)",
        "weights = weights / weights.shape[-1]",
        "test_a_run_that_names_it_uses_it_and_is_the_run_in_plain_torch",
        ("in a tiny run with 'chunked' instead of plain torch, the loss of step 1",),
    ),
    "the model does not say that it needs another function": Planted(
        'return needs | {LINEAR} if slot == "Attention.core" else needs',
        "return needs",
        "test_an_attention_core_of_its_own_is_asked_for",
        (
            "'blocks.0.attn' computes another function than its specification",
            "the site has no need for this function",
            "override 'needs'",
        ),
        suite=ModelsSuite,
    ),
    "the plan states the FLOPs of softmax attention": Planted(
        'return ("qkv", ActivationProduct(flops), "out")',
        "return super().plan_work()",
        FLOPS,
        ("FLOPs per token, and the products with weights need", "and its cores 9,216"),
        suite=ModelsSuite,
    ),
    "the plan states the FLOPs of both": Planted(
        "ActivationProduct(flops)",
        "ActivationProduct(Flops(flops.per_token, 6 * self.num_heads * self.head_dim))",
        FLOPS,
        ("states 576 FLOPs per squared length, and cores of linear attention need 0",),
        suite=ModelsSuite,
    ),
}


@pytest.mark.parametrize("planted", FAULTS.values(), ids=FAULTS)
def test_the_suites_catch(planted: Planted, plant: Plant) -> None:
    plant(PACKAGE, planted.old, planted.new)
    with pytest.raises(Fault) as caught:
        getattr(planted.suite(), planted.test)(*planted.arguments)
    assert [word for word in planted.words if word not in str(caught.value)] == [], str(caught.value)


# What an author may get wrong in the suite itself.

NAMED, CAUSAL = "test_another_function_has_a_name_and_a_reference", "test_attention_is_causal"
REFERENCE = "test_its_reference_is_a_core"


def detached(self: Any, q: Tensor, *rest: Any) -> Tensor:
    return KernelsSuite.reference(self, q.detach(), *rest)


def acausal(self: Any, q: Tensor, k: Tensor, v: Tensor, spec: Any, inputs: Any) -> Tensor:
    return KernelsSuite.reference(self, q, k, v, spec, inputs) + v.mean() * 1e-9


@pytest.mark.parametrize(
    ("changes", "test", "words"),
    [
        ({"reference": KernelSuite.reference}, NAMED, "computes = 'linear attention' without a reference; override"),
        ({"computes": ""}, NAMED, "overrides 'reference' without 'computes'"),
        ({"computes": "window"}, NAMED, "computes = 'window', whose reference is mplug_nn"),
        ({"computes": "linear"}, CAUSAL, "every case needs 'linear', because the suite sets 'computes'"),
        ({"reference": detached}, REFERENCE, "gives q no gradient"),
        ({"reference": acausal}, REFERENCE, "it is not causal"),
        ({"reference": lambda *given: KernelsSuite.reference(*given) / 0}, REFERENCE, "is not finite"),
    ],
)
def test_a_suite_that_does_not_say_what_the_kernel_computes_is_a_fault(
    changes: dict[str, Any], test: str, words: str, plant: Plant
) -> None:
    plant(PACKAGE)
    suite = type("Wrong", (KernelsSuite,), changes)()
    with pytest.raises(Fault) as caught:
        getattr(suite, test)(*(["fp32"] if test == CAUSAL else []))
    assert words in str(caught.value)


def test_a_model_whose_suite_does_not_say_what_its_cores_cost_is_a_fault(plant: Plant) -> None:
    plant(PACKAGE)
    suite = type("Wrong", (ModelsSuite,), {"core_flops": ModelSuite.core_flops})()
    with pytest.raises(Fault, match="need 'linear attention', whose FLOPs are unknown: override 'core_flops'"):
        suite.test_its_flops_are_those_of_its_matrix_products()
    ModelsSuite().test_its_flops_are_those_of_its_matrix_products()


# Who is refused, and what is proposed.


@pytest.mark.wide("suites")
def test_a_kernel_of_softmax_attention_is_refused_and_none_that_computes_another_function_is_proposed(
    plant: Plant, cli: Cli
) -> None:
    plant(PACKAGE)
    words = ("train", "--model", "linear", "--preset", "nano", "--kernels", "attention=sdpa")
    refused = cli(*words, path=sys.path[0])
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert refused.stderr.rstrip().endswith(
        "kernels/sdpa cannot serve Attention.core of 'blocks.*.attn': it does not offer linear attention; chunked can "
        "serve it: set kernels.attention=chunked"
    )


def test_a_site_of_softmax_attention_is_none_of_the_kernels(plant: Plant) -> None:
    plant(PACKAGE)
    (told,) = set(unmet_reasons(tiny_run({"kernels.attention": "chunked"})))
    assert told == (
        "kernels/chunked cannot serve Attention.core of 'blocks.*.attn': it computes linear attention, and this site "
        "asks for another function"
    )


@pytest.mark.parametrize(
    ("old", "new", "proposed"),
    [
        ("", "", "; no other installed kernel can; set kernels.attention=null for the composition in plain torch"),
        (
            "serves=frozenset({LINEAR})",
            "serves=frozenset()",
            "; no other installed kernel can, and neither can the composition in plain torch",
        ),
    ],
)
def test_plain_torch_is_proposed_only_where_it_would_do(
    old: str, new: str, proposed: str, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(PACKAGE, old, new)
    monkeypatch.setattr(alternatives, "_can_serve", lambda *_: False)
    with pytest.raises(UsageError) as refused:
        build_model(tiny_run({**TINY, "kernels.attention": "sdpa"}))
    assert str(refused.value).endswith(f"it does not offer linear attention{proposed}")


def test_a_strategy_that_does_not_know_the_function_is_refused_and_no_kernel_is_proposed(plant: Plant) -> None:
    plant(PACKAGE)
    with pytest.raises(UsageError) as refused:
        build_model(tiny_run({**TINY, "kernels.default": None, "parallel.layout": "tp2"}))
    assert str(refused.value).endswith(
        "the site needs linear attention, and the plugin's wrap does not declare it in Wrap.serves"
    )
    assert unmet_reasons(tiny_run({**TINY, "kernels.attention": "chunked"})) == []
