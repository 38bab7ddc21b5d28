"""What `mplug train` advises at its end: to sample from the run, if its model continues a text."""

from pathlib import Path
from typing import Any

import pytest
from mplug_generate.suggestion import after_training

from mplug import UsageError
from mplug_sampling.saved_model import refuse_scores
from mplug_testing.harness import tiny_run

RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "decoder": ({"model.preset": "nano", "data.name": "text"}, "sample from it with: mplug generate --name mine"),
    "without tokenizer": ({"model.preset": "nano", "data.name": "mock"}, ""),
    "encoder": ({"model.name": "bert", "model.preset": "tiny", "data.name": "text"}, ""),
    "encoder and decoder": (
        {"model.name": "t5", "model.preset": "tiny", "data.name": "text"},
        "sample from it with: mplug generate --name mine",
    ),
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_is_advised_for_sampling_if_its_model_continues_texts(kind: str, tmp_path: Path) -> None:
    settings, advice = RUNS[kind]
    run = tiny_run(settings)
    run.directory = tmp_path / "mine"
    assert not after_training(run), "nothing is saved"
    (run.directory / "checkpoints").mkdir(parents=True)
    assert after_training(run) == advice


def test_a_run_that_computes_scores_is_refused() -> None:
    run = tiny_run({"data.name": "mock", "data.pairs": True, "data.documents": 4, "objectives.reward": {}})
    with pytest.raises(UsageError, match=r"computes a score of an answer \(objectives/reward\), and continues no text"):
        refuse_scores(run, Path("runs/mine"))
