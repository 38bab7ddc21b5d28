"""Runs by kernels/te and by kernels/fp8 follow one recipe: their losses differ by rounding only.

The plugins know nothing of each other; their own tests compare operands with the definition of the recipe.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
from gpus import with_nccl

from mplug_testing import run_workers
from mplug_testing.harness import train_steps

NEEDED = ("transformer_engine", "mplug_te", "mplug_fp8")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(any(find_spec(name) is None for name in NEEDED), reason=f"one of {NEEDED} is not installed"),
    pytest.mark.filterwarnings("ignore"),  # those of Transformer Engine and of torch's compiler
]
RECIPES = {
    "tensorwise": {"scaling": "tensorwise"},
    "tensorwise, powers of two": {"scaling": "tensorwise", "power_of_two": True},
    "delayed": {"scaling": "tensorwise", "when": "delayed", "history": 4},
    "blockwise": {"scaling": "blockwise"},
}
KERNELS = ("te", "fp8")


NORM_PRODUCT, ACTIVATION_PRODUCT, EXPERTS = "Linear.norm_product", "Linear.activation_product", "Experts.product"
KIND_OF = {NORM_PRODUCT: "norm_product", ACTIVATION_PRODUCT: "activation_product", EXPERTS: "experts"}
MIXTRAL = {"model.name": "mixtral", "model.num_experts": 4, "model.vocab_size": 256, "model.ffn_hidden_size": 256}


def settings(recipe: str, kernel: str, *slots: str) -> dict[str, Any]:
    """A run in which the kernel supplies the products of linear layers, and further slots."""
    own = {f"precisions.fp8.{name}": value for name, value in RECIPES[recipe].items()}
    model: dict[str, Any] = {"model.hidden_size": 128, "model.num_attention_heads": 2, "model.num_kv_heads": 1}
    run = {"trainer.device": "cuda", "trainer.precision": "fp8", "trainer.base_modules": ["head"]}
    named = {f"kernels.{kind}": kernel if slot in slots else None for slot, kind in KIND_OF.items()}
    if ACTIVATION_PRODUCT in slots:
        model["model.activation"] = "gelu_tanh"
    return {**run, **model, **(MIXTRAL if EXPERTS in slots else {}), **own, "kernels.linear": kernel, **named}


@pytest.mark.parametrize("recipe", RECIPES)
def test_runs_have_the_same_losses_within_their_rounding(recipe: str) -> None:
    found, other = (train_steps(settings(recipe, kernel)) for kernel in KERNELS)
    assert found.losses == pytest.approx(other.losses, rel=1e-2)
    assert found.norms == pytest.approx(other.norms, rel=0.05)


def test_a_run_with_te_in_all_slots_has_the_losses_of_bf16_within_the_rounding() -> None:
    for slots, recipe in (((NORM_PRODUCT, ACTIVATION_PRODUCT), "delayed"), ((EXPERTS,), "delayed")):
        run = {**settings(recipe, "te", *slots), "kernels.attention": "te", "kernels.norm": "te", "trainer.steps": 2}
        run |= {} if EXPERTS in slots else {"kernels.norm": None}
        plain = {
            key: value for key, value in run.items() if not key.startswith(("kernels", "precisions", "trainer.base"))
        }
        found, usual = train_steps(run), train_steps({**plain, "trainer.precision": "bf16"})
        assert found.losses == pytest.approx(usual.losses, rel=2e-2)
        assert found.norms == pytest.approx(usual.norms, rel=0.1)
        assert found.losses != usual.losses


def of_rank(changes: dict[str, Any]) -> tuple[list[float], list[float]]:
    with_nccl()
    trace = train_steps(changes)
    return trace.losses, trace.norms


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {},
    "tp2, no sequence parallelism": {"parallel.tp.sequence_parallel": False},
    "zero2": {"trainer.micro_batch_size": 2},
    "fsdp2": {"trainer.micro_batch_size": 2},
    "pp2": {},
    "fsdp2, recomputed": {"memory.recompute.mode": "full"},
}


@cache
def alone(kernel: str) -> tuple[list[float], list[float]]:
    return run_workers(1, of_rank, settings("delayed", kernel))[0]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_gpus_train_as_one_within_the_rounding_of_fp8(name: str, kernel: str) -> None:
    changes = {**settings("delayed", kernel), **LAYOUTS[name], "parallel.layout": name.split(",")[0]}
    losses, norms = alone(kernel)
    for of_losses, of_norms in run_workers(2, of_rank, changes):
        assert of_losses == pytest.approx(losses, rel=1e-2)
        assert of_norms == pytest.approx(norms, rel=0.05)
