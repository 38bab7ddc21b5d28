"""The format of DeepSpeed passes the suite for formats, with a universal checkpoint."""

from pathlib import Path

import pytest
import torch

from mplug_testing import FormatSuite


class TestDeepSpeed(FormatSuite):
    plugin = "deepspeed"

    @pytest.fixture(autouse=True)
    def _universal(self, tmp_path: Path) -> None:
        generator = torch.Generator().manual_seed(1)
        for name, shape in {"norm.weight": (7,), "head.weight": (5, 8)}.items():
            folder = tmp_path / "global_step1_universal" / "zero" / name
            folder.mkdir(parents=True)
            for state in ("fp32", "exp_avg", "exp_avg_sq"):
                torch.save({"param": torch.randn(shape, generator=generator)}, folder / f"{state}.pt")
        type(self).folder = str(tmp_path / "global_step1_universal")
