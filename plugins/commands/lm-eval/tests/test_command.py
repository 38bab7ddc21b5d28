"""mplug lm-eval keeps the contract of commands. The other file compares its scores with the harness's own backend."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mplug import UsageError
from mplug_sampling.saved_model import Chosen, ModelOptions
from mplug_testing import CommandSuite
from mplug_testing.harness import tiny_run

pytest.importorskip("lm_eval")
from mplug_lm_eval.command import command


class TestLmEval(CommandSuite):
    plugin = "lm-eval"
    refused = (
        (),
        ("--tasks", "a,", "--name", "nowhere"),
        ("--tasks", "a", "--name", "nowhere"),
        ("--tasks", "a", "--limit", "0"),
        ("--tasks", "a", "--log-samples"),
        ("--tasks", "a", "--adapt", "lora"),
        ("--tasks", "a", "--include-path", "nowhere"),
        ("--tasks", "a", "--pretrained", "nowhere"),
        ("--tasks", "a", "--pretrained", ".", "--name", "both"),
        ("--tasks", "a", "--set", "steps=3"),
    )


def test_a_run_that_computes_scores_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run({"data.name": "mock", "data.pairs": True, "data.documents": 4, "objectives.reward": {}})
    weights: Any = None  # the refusal comes before anything reads them
    monkeypatch.setattr(ModelOptions, "chosen", lambda *_: Chosen({}, {}, run, weights, Path("runs/mine")))
    with pytest.raises(UsageError, match=r"computes a score of an answer .*, and continues no text"):
        CliRunner().invoke(command, ["--tasks", "a", "--name", "mine"], catch_exceptions=False)
