"""What only GPUs can show: weights gathered and gradients reduced in streams of their own, compiled units, offload."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpus import traced

from mplug_testing import run_workers

pytestmark = pytest.mark.gpu(2)

SETTINGS = (
    *("model.num_layers=6", "model.hidden_size=256", "model.num_attention_heads=8", "model.vocab_size=515"),
    *("model.tie_embeddings=true", "data.vocab_size=515", "trainer.seq_length=128", "trainer.micro_batch_size=2"),
    *("trainer.global_batch_size=16", "trainer.steps=12", "trainer.eval_every=6", "trainer.device=cuda"),
    *("schedule.warmup_steps=4", "optimizer.lr=0.001"),
)
EAGER: dict[str, object] = {"trainer__precision": "fp32", "trainer__compile": "never"}


def losses(folder: Path, name: str, layout: str, **changes: object) -> list[float]:
    """The loss of every step of a run that `mplug train` has done."""
    settings = (*SETTINGS, *(f"{name.replace('__', '.')}={value}" for name, value in changes.items()))
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "mplug", "train", "--data", "mock", "--name", name, "--parallel", layout, *words]
    finished = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=500)
    assert finished.returncode == 0, finished.stderr
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def in_fp32(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("fp32"), "one", "", **EAGER)


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("bf16"), "one", "", trainer__precision="bf16")


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_two_gpus_give_the_losses_of_one_in_fp32(
    tmp_path: Path, in_fp32: list[float], offload: bool, keep: bool
) -> None:
    options = {"parallel__fsdp__cpu_offload": offload, "parallel__fsdp__reshard_after_forward": not keep}
    assert losses(tmp_path, "two", "fsdp2", **EAGER, **options) == pytest.approx(in_fp32, rel=1e-4)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_compiled_units_in_bf16_learn_as_on_one_gpu(tmp_path: Path, in_bf16: list[float], prefetch: int) -> None:
    two = losses(tmp_path, "two", "fsdp2", trainer__precision="bf16", parallel__fsdp__prefetch=prefetch)
    assert two == pytest.approx(in_bf16, rel=5e-3)


@pytest.mark.gpu(4)
@pytest.mark.parametrize("layout", ["dp2fsdp2", "fsdp2tp2", "fsdp2pp2"])
def test_four_gpus_give_the_losses_of_one(tmp_path: Path, in_fp32: list[float], layout: str) -> None:
    assert losses(tmp_path, "four", layout, **EAGER) == pytest.approx(in_fp32, rel=1e-4)


@pytest.mark.filterwarnings("ignore")  # torch's own, as it traces
@pytest.mark.parametrize(("precision", "compiler"), [("fp32", "never"), ("bf16", "never"), ("bf16", "inductor")])
def test_copy_engines_change_no_bit(precision: str, compiler: str) -> None:
    settings = {"trainer.device": "cuda", "trainer.precision": precision, "trainer.compile": compiler}
    settings |= {"trainer.deterministic": True, "parallel.layout": "fsdp2", "model.num_layers": 3}
    ways = (
        {f"parallel.fsdp.{one}": way for one in ("transport", "sum_transport")} for way in ("copy_engines", "messages")
    )
    copied, sent = (run_workers(2, traced, {**settings, "model.tie_embeddings": True, **way}) for way in ways)
    assert [trace.losses for trace in copied] == [trace.losses for trace in sent]
    assert [trace.norms for trace in copied] == [trace.norms for trace in sent]
