"""The Triton kernels: that they pass the suite, and where they are offered.

They run on a GPU, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mplug_triton
import pytest
import tiny_models
import torch
from mplug_triton import WIDEST, Triton
from offers import run
from triton_kernels import INTERPRETED, assert_interpreted, outside_of_the_interpreter, repair_the_interpreter

from mplug import Offer, Run, Site
from mplug.model.build import build_model
from mplug.model.slots.offers import PLAIN
from mplug_nn import SLOTS, AttentionSpec
from mplug_testing import KernelSuite
from mplug_testing.harness import tiny_run

if INTERPRETED:
    repair_the_interpreter()
SUBJECTS = ("triton", "attention", "largest_logits", "norm", "qkv", "rows", "sinkhorn", "swiglu")
# The interpreter takes milliseconds a program, so there the tiny run is tinier.
SMALLER = {"model.num_layers": 1, "trainer.seq_length": 12, "trainer.global_batch_size": 2, "trainer.eval_samples": 2}


@pytest.mark.usefixtures("kernels_run")
@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
class TestTriton(KernelSuite):
    plugin = "triton"
    settings = {
        "trainer.device": "cpu" if INTERPRETED else "cuda",
        "trainer.compile": "aot_eager",
        **(SMALLER if INTERPRETED else {}),
    }

    def _offered(self, dtype: str | None = None) -> tuple[Run, list[Offer]]:
        run, offers = super()._offered(dtype)
        return run, [one for one in offers if CORE not in one.suppliers]  # it serves attention only if it is named


@pytest.mark.usefixtures("kernels_run")
@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
class TestRows(KernelSuite):
    plugin = "triton"
    settings = {**TestTriton.settings, **tiny_models.EXPERTS, "trainer.micro_batch_size": 2}

    @classmethod
    def naming(cls) -> dict[str, Any]:
        return {"kernels.dispatch": cls.plugin}

    def _offered(self, dtype: str | None = None) -> tuple[Run, list[Offer]]:
        run, offers = super()._offered(dtype)
        return run, [one for one in offers if DISPATCH in one.suppliers]


@pytest.mark.skipif(INTERPRETED, reason="all cases of attention take minutes there; test_attention.py has small ones")
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
class TestAttention(KernelSuite):
    plugin = "triton"
    settings = {"trainer.device": "cuda", "model.hidden_size": 128, "model.num_attention_heads": 2}
    dtypes = ("bf16", "fp32")

    @classmethod
    def naming(cls) -> dict[str, Any]:
        return {"kernels.attention": cls.plugin}

    def _offered(self, dtype: str | None = None) -> tuple[Run, list[Offer]]:
        run, offers = super()._offered(dtype)
        return run, [one for one in offers if CORE in one.suppliers]


@pytest.mark.skipif(INTERPRETED, reason="it needs no Triton")
@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
@pytest.mark.wide("suites", tests=["test_a_run_that_names_it_uses_it_and_is_the_run_in_plain_torch"])
class TestActivation(KernelSuite):
    plugin = "triton"
    dtypes = ("bf16",)
    settings = {"trainer.compile": "aot_eager", **SMALLER}

    @classmethod
    def naming(cls) -> dict[str, Any]:
        return {"kernels.activation": cls.plugin}

    def _offered(self, dtype: str | None = None) -> tuple[Run, list[Offer]]:
        run, offers = super()._offered(dtype)
        return run, [one for one in offers if "MLP.activation" in one.suppliers]


@outside_of_the_interpreter
def test_what_runs_on_a_device_runs_in_tritons_interpreter_too() -> None:
    assert_interpreted(*(Path(__file__).with_name(f"test_{subject}.py") for subject in SUBJECTS))


# What it claims.

CORE, NORM, QKV, ACTIVATION = "Attention.core", "Norm.norm_residual", "Attention.prepare_qkv", "MLP.activation"
DISPATCH, COMBINE, LARGEST = "Experts.dispatch", "Experts.combine", "LargestLogits.maximum"
BALANCE = "Router.balanced_scores"
OFFERS = Triton(Triton.Config()).offer(run("cpu"))
NAMED = dict.fromkeys(("attention", "largest_logits", "norm", "qk", "activation", "dispatch"), "kernels/triton")


class Block(SimpleNamespace):
    SLOTS = (*SLOTS.values(),)


def at(slot: str, *needs: str, size: int = 64, kind: str = "gelu", dropout: float = 0.0) -> Site:
    """A norm of a width, attention of a head dim, experts of a width, or an activation of a kind."""
    up, spec = torch.empty(2, 3, size, device="meta"), AttentionSpec(1.0, size, size, dropout=dropout)
    module = Block(weight=torch.empty(size, device="meta"), head_dim=size, kind=kind, up=up, spec=spec)
    return Site("blocks.*", slot, module, "", frozenset(needs))


def during(
    device: str = "cuda", precision: str = "bf16", compiler: str | None = "inductor", named: dict[str, str] = NAMED
) -> Any:
    """A run whose config names the plugin for all its slots."""
    found = run(device, precision, **named)
    found.compiler, found.config.trainer.compile = compiler, compiler or "never"
    return found


def answer(site: Site, run: Any) -> bool | str:
    answers = [one.answer(site, run) for one in OFFERS if site.slot in one.suppliers]
    return next((one for one in answers if one is not False), False)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """There is Triton, as far as `supports` can see, and no interpreter."""
    monkeypatch.setattr(mplug_triton, "find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    return monkeypatch


def test_it_supplies_each_slot_apart_from_the_others() -> None:
    alone = [{CORE}, {LARGEST}, {NORM}, {QKV}, {DISPATCH, COMBINE}, {BALANCE}, *[{ACTIVATION}] * 2]
    assert [set(offer.suppliers) for offer in OFFERS] == alone


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "site",
    [
        *(at(QKV, size=head_dim) for head_dim in (16, 24, 128, 256)),
        at(QKV, "scaled rotary"),
        *(at(LARGEST, "window", "document_lengths", "position groups", size=width) for width in (24, 256)),
        at(LARGEST, "full attention", dropout=0.1),
        *(at(slot, size=width) for slot in (NORM, DISPATCH, COMBINE) for width in (1, 33, 2048, WIDEST)),
        at(ACTIVATION),
    ],
)
def test_it_serves_even_head_dims_rows_that_registers_hold_largest_logits_and_exact_gelu(site: Site) -> None:
    assert answer(site, during()) is answer(site, during(named={})) is True


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("size", [16, 64, 96, 256])
def test_it_serves_windows_soft_caps_sinks_and_documents_together_named_or_not(size: int) -> None:
    needs = ("window", "soft cap", "attention sinks", "document_lengths", "full attention", "log-sum-exp")
    assert answer(at(CORE, *needs, size=size), during()) is True
    assert answer(at(CORE, *needs, size=size), during(named={})) is True
    for slot in (CORE, LARGEST):
        assert answer(at(slot, size=257), during(named={})) is False  # left to other kernels and plain torch


NO_ROOM = f"of up to {WIDEST} elements, which fit into registers, and this site's have {WIDEST + 1}"
TO_FP32 = "it computes in fp32, and trainer.precision=fp64 computes in float64"
TWO_KINDS = "supports 'gelu' and 'swiglu', and this site's activation is 'gelu_tanh'; set kernels.activation=null"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("site", "run", "words"),
    [
        (at(QKV, size=33), during(), "head dim is 33"),
        (at(CORE, size=257), during(), "it supports head dims of up to 256, and this site's is 257"),
        (at(LARGEST, size=257), during(), "it supports head dims of up to 256, and this site's is 257"),
        (at(CORE, dropout=0.1), during(), "it does not support dropout, and attention dropout is 0.1"),
        (at(CORE, "alibi bias"), during(), "it does not offer alibi bias"),
        (at(CORE), during("cpu"), "it needs a CUDA GPU, and this run is on the CPU"),
        (at(CORE), during(precision="fp64"), TO_FP32),
        *((at(slot, size=WIDEST + 1), during(), NO_ROOM) for slot in (NORM, DISPATCH, COMBINE)),
        *((at(slot), during("cpu"), "needs a CUDA GPU") for slot in (NORM, QKV, DISPATCH, LARGEST)),
        *((at(slot), during(precision="fp64"), TO_FP32) for slot in (NORM, QKV, COMBINE, LARGEST)),
        *((at(slot, "log-sum-exp"), during(), "does not offer log-sum-exp") for slot in (NORM, QKV, ACTIVATION)),
        (at(NORM, "offset_rmsnorm norm"), during(), "it does not offer offset_rmsnorm norm"),
        *((at(QKV, need), during(), f"it does not offer {need}") for need in ("partial rotary", "wide QK-norm")),
        (at(ACTIVATION, kind="gelu_tanh"), during(), TWO_KINDS),
        (at(ACTIVATION, kind="swiglu"), during("cpu"), "it needs a CUDA GPU, and this run is on the CPU"),
        (at(ACTIVATION), during(precision="fp32"), "errors of up to 2.8e-6, which are too large for float32"),
        (at(ACTIVATION), during(compiler=None), "units are eager (trainer.compile=never on 'cuda')"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(site: Site, run: Any, words: str) -> None:
    assert words in str(answer(site, run))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("site", "run"),
    [
        (at(NORM, "offset_rmsnorm norm"), during(named={})),
        (at(QKV, "partial rotary"), during(named={})),
        (at(QKV, "wide QK-norm"), during(named={})),
        (at(ACTIVATION, "log-sum-exp"), during(named={})),
        (at(ACTIVATION, kind="gelu_tanh"), during(named={})),
        (at(ACTIVATION), during(precision="fp32", named={})),
        (at(ACTIVATION), during(compiler=None, named={})),
    ],
)
def test_sites_for_which_the_config_does_not_name_it_go_to_plain_torch(site: Site, run: Any) -> None:
    assert answer(site, run) is False


@pytest.mark.parametrize("slot", [NORM, QKV])
def test_an_interpreter_runs_on_a_cpu_and_without_triton_it_says_what_to_install(
    slot: str, installed: pytest.MonkeyPatch
) -> None:
    installed.setenv("TRITON_INTERPRET", "1")
    assert answer(at(slot), during("cpu")) is True
    installed.setattr(mplug_triton, "find_spec", lambda _: None)
    assert "triton is not installed; install 'mplug-triton[triton]'" in str(answer(at(slot), during()))
    installed.delenv("TRITON_INTERPRET")
    assert answer(at(slot), during("cpu")) == "it needs a CUDA GPU, and this run is on the CPU"


@pytest.mark.wide("suites")
def test_neither_importing_it_nor_asking_it_imports_triton() -> None:
    code = (
        "import sys; from types import SimpleNamespace; sys.modules['triton'] = None; from mplug_triton import Triton; "
        "Triton(Triton.Config()).offer(SimpleNamespace(device='cpu'))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


HALF = {"trainer.precision": "bf16", "trainer.compile": "aot_eager"}
SWIGLU = {"model.activation": "swiglu"}


@pytest.mark.parametrize(
    ("otherwise", "supplier"),
    [
        ({}, "kernels/triton"),
        (SWIGLU, PLAIN),
        ({"trainer.precision": "fp32"}, PLAIN),
        ({"trainer.compile": "auto"}, PLAIN),
    ],
)
def test_as_the_default_kernel_it_serves_activations_where_it_can_and_leaves_the_rest_to_plain_torch(
    otherwise: dict[str, Any], supplier: str
) -> None:
    elsewhere = {"kernels.qk": None, "kernels.norm": None}  # which want a GPU
    model = build_model(tiny_run({**HALF, "kernels.default": "triton", **elsewhere, **otherwise}))
    assert {filled.supplier for filled in model.slots if filled.site.slot == ACTIVATION} == {supplier}
