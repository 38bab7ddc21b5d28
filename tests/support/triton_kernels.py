"""Tests of Triton kernels, on a GPU or in Triton's interpreter (TRITON_INTERPRET=1), bit by bit."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
CANNOT_RUN = find_spec("triton") is None or not (INTERPRETED or torch.cuda.is_available())


def runs(test: Callable[..., None]) -> Callable[..., None]:
    """A test of kernels, which is one of the GPU's tests outside of the interpreter."""
    skipping = pytest.mark.skipif(CANNOT_RUN, reason="it needs Triton, and a GPU or TRITON_INTERPRET=1")
    marked: Callable[..., None] = skipping(test if INTERPRETED else pytest.mark.gpu(test))
    return marked


outside_of_the_interpreter = pytest.mark.skipif(
    find_spec("triton") is None or INTERPRETED, reason="it needs Triton, outside of its interpreter"
)


def assert_interpreted(*files: Path) -> None:
    """The tests of kernels in these files pass in Triton's interpreter, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", *map(str, files)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "passed" in finished.stdout


@pytest.fixture(autouse=True)
def torchs_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter rounds to bf16 and fp8 wrongly (no ties to even, no carry), so there torch rounds.

    As on a GPU, infinity saturates, and there is one NaN.
    """
    if not INTERPRETED or find_spec("triton") is None:
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    formats = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
    plain = interpreter._convert_float

    def converted(numbers: Any, source: Any, target: Any, mode: Any) -> Any:
        if target == tl.bfloat16 and source == tl.float32:
            exact = torch.from_numpy(np.ascontiguousarray(numbers).view(np.float32))
            return exact.bfloat16().view(torch.uint16).numpy()
        if target not in formats:
            return plain(numbers, source, target, mode)
        wide = torch.from_numpy(np.ascontiguousarray(numbers).view(np.float32))
        end = float(torch.finfo(formats[target]).max)
        wide = torch.where(wide.isnan(), torch.nan, wide.clamp(-end, end))
        return wide.to(formats[target]).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)


def bits(x: Tensor) -> Tensor:
    """The bits of fp8 numbers or fp32, as integers."""
    return x.cpu().contiguous().view({1: torch.uint8, 4: torch.int32}[x.element_size()])


def assert_bits(found: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    for number, (ours, exact) in enumerate(zip(found, right, strict=True)):
        assert (ours.shape, ours.dtype) == (exact.shape, exact.dtype), f"result {number}"
        differing = int((bits(ours) != bits(exact)).sum())
        assert not differing, f"{differing} of {ours.numel()} in result {number}"


def repair_the_interpreter() -> None:
    """Let Triton's interpreter count loops and multiply bf16.

    It converts arrays of one number to integers, which numpy refuses from 2.4 on, and multiplies the bits of bf16.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor, builder = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder
    multiply = builder.create_dot
    if getattr(multiply, "repaired", False):
        return

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, widened(a), widened(b), *rest)

    create_dot.repaired = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor, builder.create_dot = patched, create_dot
