"""What the tests of the kernels share."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.fixture(scope="class")
def kernels_run() -> None:
    """The kernels run here: there is Triton, and a GPU or its interpreter."""
    if find_spec("triton") is None:
        pytest.skip("it needs Triton")
    if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
        pytest.skip("it needs a GPU or TRITON_INTERPRET=1")


class Recorded(TorchDispatchMode):
    """The names of all operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def operators_of() -> Callable[[Callable[[], object]], list[str]]:
    def operators(call: Callable[[], object]) -> list[str]:
        with Recorded() as recorded:
            call()
        return recorded.names

    return operators
