"""The Triton kernels: that they pass the suite, and where they are offered.

They run on a GPU, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mplug_triton
import pytest
import torch
from mplug_triton import WIDEST, Triton

from mplug import Site
from mplug.errors import UsageError
from mplug_nn import SLOTS
from mplug_testing import KernelSuite, precision_named
from mplug_testing.harness import tiny_run

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE = Path(__file__).parent

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


@pytest.mark.skipif(find_spec("triton") is None or INTERPRETED, reason="it needs Triton, outside of its interpreter")
def test_what_runs_on_a_device_runs_in_tritons_interpreter_too() -> None:
    files = [str(HERE / f"test_{subject}.py") for subject in ("triton", "norm", "qkv")]
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", *files],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "passed" in finished.stdout


# What it claims.

NORM, QKV = "Norm.norm_residual", "Attention.prepare_qkv"


class Block(SimpleNamespace):
    """A module with every slot."""

    SLOTS = (*SLOTS.values(),)


def answer(
    slot: str, size: int = 64, device: str = "cuda", *needs: str, precision: str = "bf16", named: bool = True
) -> bool | str:
    """To a norm of a width, or to attention of a head dim; `named`: the config names the plugin for these slots."""
    module = Block(weight=torch.empty(size, device="meta"), head_dim=size)
    offered = next(one for one in Triton(Triton.Config()).offer() if slot in one.suppliers)
    kinds = dict.fromkeys(("norm", "qk"), "kernels/triton") if named else {}
    config = SimpleNamespace(trainer=SimpleNamespace(precision=precision), kernels=SimpleNamespace(kinds=kinds))
    run: Any = SimpleNamespace(device=device, config=config, precision=precision_named(precision))
    return offered.answer(Site("blocks.*", slot, module, "", frozenset(needs)), run)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """There is Triton, as far as `supports` can see, and no interpreter."""
    monkeypatch.setattr(mplug_triton, "find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return monkeypatch


def test_it_supplies_norms_packed_heads_and_the_activation_apart_from_each_other() -> None:
    offers = Triton(Triton.Config()).offer()
    assert [set(offer.suppliers) for offer in offers] == [{NORM}, {QKV}, {"MLP.activation"}]


@pytest.mark.usefixtures("installed")
def test_it_serves_even_head_dims_on_a_gpu() -> None:
    assert [answer(QKV, head_dim) for head_dim in (16, 24, 128, 256)] == [True] * 4
    assert "head dim is 33" in str(answer(QKV, 33))


@pytest.mark.usefixtures("installed")
def test_it_serves_norms_of_rows_that_registers_hold() -> None:
    assert [answer(NORM, width) for width in (1, 33, 2048, WIDEST)] == [True] * 4
    assert f"of up to {WIDEST} elements, which fit into registers, and this site's have {WIDEST + 1}" in str(
        answer(NORM, WIDEST + 1)
    )


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("slot", [NORM, QKV])
def test_what_a_site_needs_beyond_the_plain_case_it_does_not_offer(slot: str) -> None:
    assert "does not offer log-sum-exp" in str(answer(slot, 64, "cuda", "log-sum-exp"))


@pytest.mark.usefixtures("installed")
def test_other_norms_and_rotary_positions_go_to_plain_torch_unless_the_config_names_it() -> None:
    for slot, need in ((NORM, "offset_rmsnorm norm"), (QKV, "partial rotary"), (QKV, "wide QK-norm")):
        assert answer(slot, 64, "cuda", need) == f"it does not offer {need}"
        assert answer(slot, 64, "cuda", need, named=False) is False
    assert answer(QKV, 64, "cuda", "scaled rotary") is True


@pytest.mark.parametrize("slot", [NORM, QKV])
def test_on_a_cpu_it_says_that_it_needs_a_gpu_unless_it_is_interpreted(
    slot: str, installed: pytest.MonkeyPatch
) -> None:
    assert "needs a CUDA GPU" in str(answer(slot, 64, "cpu"))
    installed.setenv("TRITON_INTERPRET", "1")
    assert answer(slot, 64, "cpu") is True


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("slot", [NORM, QKV])
def test_what_would_be_rounded_to_fp32_it_does_not_serve(slot: str) -> None:
    assert answer(slot, precision="fp64") == "it computes in fp32, and trainer.precision=fp64 computes in float64"


@pytest.mark.parametrize("slot", [NORM, QKV])
def test_without_triton_it_can_be_asked_and_says_what_to_install(slot: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mplug_triton, "find_spec", lambda _: None)
    assert "triton is not installed; install 'mplug-triton[triton]'" in str(answer(slot))


def test_neither_importing_it_nor_asking_it_imports_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; from mplug_triton import Triton; Triton(Triton.Config()).offer()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="it is for machines that cannot run it")
@pytest.mark.parametrize(("kind", "slot", "role"), [("qk", QKV, r"blocks\.\*\.attn"), ("norm", NORM, r".*norm.*")])
def test_a_run_that_names_it_without_a_gpu_is_refused_with_the_reason(kind: str, slot: str, role: str) -> None:
    from mplug.model.build import build_model

    with pytest.raises(UsageError, match=rf"kernels/triton cannot serve {slot} of '{role}': "):
        build_model(tiny_run({f"kernels.{kind}": "triton"}))
