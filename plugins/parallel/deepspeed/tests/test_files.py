"""Tensors in files: values, which tensors, and full disks."""

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("mplug_deepspeed")

from mplug_deepspeed import files
from mplug_deepspeed.files import LEAST, StatesInFiles, in_file

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


def test_large_new_states_are_in_files_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Tensor] = []
    monkeypatch.setattr(files, "in_file", lambda x, folder: found.append(x) or in_file(x, folder))
    many, parameter = LEAST // 4, torch.nn.Parameter(torch.ones(LEAST))
    with StatesInFiles(tmp_path):
        kept = [torch.zeros(many), parameter.detach().clone(), torch.zeros_like(parameter), parameter.double().float()]
        assert len(found) == 4
        torch.zeros(many - 1), torch.zeros(many, dtype=torch.bfloat16), torch.zeros(many, 2).t().clone()
        before = len(found)  # the zeros before the transposition are large, contiguous and new
        kept[0].add_(1), kept[0][1:], kept[0].view(2, -1), parameter.detach()
        assert len(found) == before == 5
    assert float(kept[0].sum()) == many
    assert torch.equal(kept[1], parameter)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    words = f"in files of '{tmp_path}', and 0.00391 GiB cannot be written there: No space left on device; free some"
    with pytest.raises(RunError, match=re.escape(words)):
        in_file(torch.zeros(1 << 20), tmp_path)
    assert list(tmp_path.iterdir()) == []
