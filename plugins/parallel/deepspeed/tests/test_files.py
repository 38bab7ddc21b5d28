"""Tensors in files: values, full disks, and optimizers whose states cannot be moved."""

import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("mplug_deepspeed")

from mplug_deepspeed.files import in_file, move, move_states

from mplug import RunError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 7)])
def test_a_tensor_in_a_file_has_the_values_and_can_be_written(
    tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.randn(shape).to(dtype)
    found = in_file(x, tmp_path)
    assert torch.equal(found, x)
    found.add_(1)
    assert torch.equal(found, x + 1)
    assert list(tmp_path.iterdir()) == []


def test_a_moved_tensor_stays_the_same_object(tmp_path: Path) -> None:
    x = torch.randn(4, requires_grad=True)
    before, address = x.detach().clone(), x.data_ptr()
    move(x, tmp_path)
    assert x.data_ptr() != address
    assert torch.equal(x, before)


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    words = f"in files of '{tmp_path}', and 0.00391 GiB cannot be written there: No space left on device; free some"
    with pytest.raises(RunError, match=re.escape(words)):
        in_file(torch.zeros(1 << 20), tmp_path)
    assert list(tmp_path.iterdir()) == []


class Anew:
    """An optimizer that makes its states anew when it is asked."""

    def state(self, piece: Any) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(piece.master)}


def test_states_that_an_optimizer_makes_anew_cannot_be_moved(tmp_path: Path) -> None:
    piece: Any = SimpleNamespace(name="head.weight", master=torch.ones(4))
    optimizer: Any = Anew()
    with pytest.raises(RunError, match=r"makes the state 'momentum' of 'head.weight' anew"):
        move_states(optimizer, [piece], tmp_path)
