"""Which kernel of `kernels.default` fills attention on an H200, without one: for models and conditions of choices.yaml.

python tests/support/choices.py    (the table of docs/kernels.md)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml

from mplug.config.defaults import default_settings
from mplug.errors import UsageError
from mplug.model.build import build_model
from mplug.model.model import Model
from mplug.run.run import Run
from mplug_sampling.sampler import Sampler, sampling_run
from mplug_testing.harness import as_rank, tiny_config, tiny_run

TABLES: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(Path(__file__).with_name("choices.yaml").read_text())
FAMILIES, CONDITIONS = TABLES["families"], TABLES["conditions"]
LIST: list[str] = default_settings()["kernels", "default"].value
"""The default kernels."""
SAMPLING, CORE = "sampling", "Attention.core"


def settings_of(family: str) -> dict[str, Any]:
    """A run of a family in bf16 with the default kernels, on this machine's device."""
    return {
        "model.name": FAMILIES[family]["name"],  # another model drops the fields that are set before it
        **{f"model.{name}": value for name, value in FAMILIES[family].items()},
        "kernels.default": LIST,
        "trainer.precision": "bf16",
        "trainer.seq_length": 128,
    }


@contextmanager
def hopper(flash: bool = True, chip: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Let plugins see a GPU, an H200 unless named, with Triton, cuDNN 9.15.1 and maybe flash-attn-4."""
    with (
        patch("mplug.model.build.choose_device", lambda _: "cuda"),
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "get_device_capability", lambda: chip),
        patch.object(torch.backends.cudnn, "version", lambda: 91501),
        patch("mplug_flash.versions._is_installed", lambda name: flash and name == "flash-attn-4"),
        patch("mplug_flash.versions._broken", lambda _: ""),
        patch("mplug_triton.find_spec", lambda name: name),
    ):
        yield


def built(family: str, condition: str, **changes: Any) -> tuple[Run, Model, Sampler | None]:
    """The model of a family under a condition, as a rank of a machine with a GPU builds it."""
    if condition != SAMPLING:
        run = tiny_run({**settings_of(family), **CONDITIONS[condition], **changes})
        return run, build_model(run), None
    sampler = Sampler(padded=True)
    run = as_rank(sampling_run(tiny_config(settings_of(family)), sampler))
    return run, build_model(run), sampler


def chosen(family: str, condition: str, **changes: Any) -> list[str]:
    """The suppliers of attention, without repetition, in the order of blocks; with ' (caches grow)' if they do."""
    run, model, sampler = built(family, condition, **changes)
    labels = [one.supplier_label(run).removeprefix("kernels/") for one in model.slots if one.site.slot == CORE]
    grows = " (caches grow)" if sampler is not None and sampler.growing else ""
    return [f"{label}{grows}" for label in dict.fromkeys(labels)]


def short(label: str) -> str:
    """A label as the page has it."""
    return label.replace(" (flash-attn-4)", "").replace(" (torch's choice)", "").replace("torch's ", "")


def table() -> str:
    """A row for each family, a column for each condition."""
    columns = [*CONDITIONS, SAMPLING]
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for family in FAMILIES:
        cells = []
        for condition in columns:
            try:
                cells.append(", ".join(map(short, chosen(family, condition))))
            except UsageError:
                cells.append("refused")
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    with hopper():
        print(table())
