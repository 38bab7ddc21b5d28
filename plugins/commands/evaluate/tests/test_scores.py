"""Reward models and classifiers are evaluated by their own loss and figures, those of a step of training."""

import json
from pathlib import Path
from typing import Any

import pytest
from drawn_weights import DrawnWeights, drawn
from mplug_evaluate.report import report
from mplug_evaluate.work import Found, Job, measured, prepared, refuse_texts

from mplug import UsageError
from mplug.model.pieces import write_weights
from mplug.training.assembly import build
from mplug_nn import set_objective
from mplug_testing.harness import as_rank, in_fp64, overrides_of, tiny_config, tiny_run, tiny_settings
from mplug_testing.workers import run_workers

SHAPE: dict[str, Any] = {"kernels.default": None, "trainer.seq_length": 24, "data.name": "mock"}
PAIRS = {**SHAPE, "data.documents": 5, "data.pairs": True, "objectives.reward.center_coefficient": 0.05}
TEXTS = {**SHAPE, "data.vocab_size": 3, "objectives.classify.labels": ["a", "b", "c"]}
RUNS = {"reward": PAIRS, "classify": TEXTS}
SAMPLES = 8


def job_of(name: str, layout: str = "", **changes: Any) -> Job:
    weights: Any = DrawnWeights(Path("drawn"))
    own = overrides_of(in_fp64({**RUNS[name], "parallel.layout": layout}))
    return Job(tiny_settings(), own, weights, None, None, "train", SAMPLES, **changes)


def found_by_all(jobs: list[Job]) -> list[Found]:
    return [measured(as_rank(prepared(job)), job) for job in jobs]


def trained(name: str) -> tuple[float, float, dict[str, float]]:
    """(loss, number of targets, figures) of a step of training on the same samples, with the same weights."""
    parts = build(tiny_run(in_fp64({**RUNS[name], "trainer.global_batch_size": SAMPLES, "optimizer.weight_decay": 0})))
    for piece in parts.pieces:
        piece.master.copy_(drawn(piece.name, tuple(piece.master.shape)))
    write_weights(parts.pieces)
    parts.model.weights_written()
    parts.stepper.forward_backward(parts.train_loader.take(SAMPLES), 1)
    result = parts.stepper.update(0.0, 0.0)
    return float(result.loss), float(result.tokens), {n: float(one) for n, one in result.statistics.items()}


@pytest.mark.wide("layouts", quick=["1-layouts0-reward", "1-layouts0-classify"])
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize(("world", "layouts"), [(1, ("",)), (2, ("tp2", "pp2", "cp2", "dp2", "fsdp2"))])
def test_loss_and_figures_are_those_of_a_step_under_every_layout(
    name: str, world: int, layouts: tuple[str, ...]
) -> None:
    loss, number, figures = trained(name)
    jobs = [job_of(name, layout) for layout in layouts]
    ranks = run_workers(world, found_by_all, jobs) if world > 1 else [found_by_all(jobs)]
    for layout, *results in zip(layouts, *ranks, strict=True):
        for found in results:
            (row,) = found.rows
            assert (row.num_tokens, row.loss) == (number, pytest.approx(loss, rel=1e-10)), layout
            assert row.figures == pytest.approx(figures, rel=1e-10), layout
            assert row.figures.keys() == figures.keys() > set(), layout


def test_the_table_has_the_figures_and_no_perplexity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = job_of("reward")
    found = measured(as_rank(prepared(job)), job)
    report(found, tmp_path / "found.json")
    header, _, said = capsys.readouterr().out.splitlines()
    assert header.split() == ["data", "targets", "loss", "accuracy", "margin", "mean_reward"]
    assert said == "loss and figures are those of objectives/reward, means over the targets"
    written = json.loads((tmp_path / "found.json").read_text())
    (row,) = written["results"]
    assert (written["loss_of"], row["figures"], row["perplexity"]) == (
        found.objective,
        dict(found.rows[0].figures),
        None,
    )


def test_texts_and_shares_of_tokens_are_refused() -> None:
    with pytest.raises(UsageError, match=r"computes a score of an answer \(objectives/reward\), and 'a\.txt' would be"):
        refuse_texts(tiny_config(PAIRS), Path("a.txt"))
    with pytest.raises(UsageError, match="--accuracy counts tokens, and the model computes scores of classes"):
        prepared(job_of("classify", accuracy=True))


def test_scores_that_only_a_model_that_trains_computes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a plugin that uses `set_objective`: the model's own loss would be printed as that of the scores."""
    monkeypatch.setattr("mplug_nn.replace_end", set_objective)
    job = job_of("classify")
    with pytest.raises(UsageError, match="objectives/classify computes scores of classes in training alone"):
        measured(as_rank(prepared(job)), job)
