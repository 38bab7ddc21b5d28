"""A run of one step that begins with a published folder, and its export, which must be that folder."""

import json
from pathlib import Path
from typing import Any

import torch
from published import run_of, tensors

from mplug.training.loop import train

ONE_STEP = {
    "trainer.steps": 1,
    "trainer.global_batch_size": 2,
    "trainer.eval_every": 0,
    "optimizer.lr": 1e-30,
    "optimizer.weight_decay": 0.0,
}
"""With this learning rate, the weights of a checkpoint are those that the run began with."""


def assert_exported_as_it_was(folder: Path, settings: dict[str, Any], tmp_path: Path, cli: Any) -> None:
    """The folder that a run of a folder is exported as has the same tensors and the same files of JSON."""
    run = run_of(folder, settings)
    run.directory = tmp_path / "runs" / "tuned"
    train(run)
    result = cli("checkpoint", "export", "--to", "huggingface", "exported")
    assert result.returncode == 0, result.stderr
    found, expected = tensors(tmp_path / "exported"), tensors(folder)
    assert found.keys() == expected.keys()
    for name, (_, tensor) in expected.items():
        assert torch.equal(found[name][1], tensor), name
    for file in folder.glob("*.json"):
        if "index" not in file.name:
            written = (tmp_path / "exported" / file.name).read_text()
            assert json.loads(written) == json.loads(file.read_text()), file.name
