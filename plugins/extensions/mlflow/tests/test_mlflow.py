"""MLflow: what its own client finds in the store of a run."""

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("alembic")
pytest.importorskip("sqlalchemy")
pytest.importorskip("mlflow")

from mlflow import MlflowClient
from mlflow.entities import Run as MLflowRun
from mplug_mlflow import MLflow
from mplug_mlflow.writer import FILE, MOST_METRICS

from mplug import UsageError
from mplug.registry.hooks import HOST
from mplug.run.prepare import prepare
from mplug.training.loop import train
from mplug.training.metrics_writer import MetricsFile
from mplug_testing import ExtensionSuite
from mplug_testing.harness import tiny_config

DEPRECATED = pytest.mark.filterwarnings("ignore:.*noload.*:DeprecationWarning")  # MLflow 3.17 with SQLAlchemy 2.1


@pytest.fixture(autouse=True, scope="module")
def folders_as_stores(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """MLflow allows stores in folders only if it is asked to. A database takes seconds to make.

    Workers do not get these variables: their default store is a database in their own folder.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("MLFLOW_TRACKING_URI", str(tmp_path_factory.mktemp("stores") / "mlruns"))
        yield


@DEPRECATED
@pytest.mark.wide("loggers")
class TestMLflow(ExtensionSuite):
    plugin = "mlflow"
    files = (FILE, "/*/mlruns/*", "/*/mlflow.db*")
    keeps_history = False  # the history is in the store; the test of a resumed run below reads it
    checks_fields = False  # the tests below check each field


def write(directory: Path, steps: range, rank: int = 0, **config: Any) -> None:
    """The steps of a run, with a validation loss in every third."""
    plugin = MLflow(MLflow.Config(**{"tracking_uri": str(directory / "store"), **config}))
    directory.mkdir(exist_ok=True)
    resolved = {
        "trainer": {"steps": 8},
        "optimizer": {"lr": 0.5, "betas": [0.9, 0.99]},
        "memory": {},
        "note": "x" * 900,
    }
    run: Any = SimpleNamespace(rank=rank, directory=directory, config=SimpleNamespace(resolved=lambda: resolved))
    plugin.run_started(run)
    for step in steps:
        record: dict[str, Any] = {"step": step, "loss": 100 * steps[0] + step, "mfu": None, "skipped": False}
        record |= {"val_loss": step / 2} if step % 3 == 0 else {}
        plugin.step_finished(record | {"statistics": {"blocks.0.moe.router.load": [0.25, 0.75]}})
    plugin.run_finished()


def read(directory: Path, uri: str | None = None, experiment: str = "mplug") -> tuple[MlflowClient, list[MLflowRun]]:
    client = MlflowClient(tracking_uri=uri or str(directory / "store"))
    found = client.get_experiment_by_name(experiment)
    return client, list(client.search_runs([found.experiment_id])) if found else []


def history(client: MlflowClient, run: MLflowRun, name: str) -> Sequence[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]


@DEPRECATED
@pytest.mark.wide("loggers")
def test_every_number_and_the_settings_are_in_a_database(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    write(tmp_path / "first", range(1, 5), tracking_uri=uri, experiment="ours", tags={"team": "a"})
    client, (run,) = read(tmp_path, uri, "ours")
    assert (run.info.run_name, run.info.status, run.data.tags["team"]) == ("first", "FINISHED", "a")
    assert history(client, run, "loss") == [(1, 101), (2, 102), (3, 103), (4, 104)]
    assert history(client, run, "val_loss") == [(3, 1.5)]
    assert history(client, run, "statistics/blocks.0.moe.router.load/1") == [(step, 0.75) for step in range(1, 5)]
    assert set(run.data.metrics) == {
        *("loss", "val_loss", "skipped"),
        *(f"statistics/blocks.0.moe.router.load/{number}" for number in (0, 1)),
    }
    note = run.data.params.pop("note")
    assert 100 < len(note) < 900
    assert run.data.params == {
        "trainer.steps": "8",
        "optimizer.lr": "0.5",
        "optimizer.betas": "[0.9, 0.99]",
        "memory": "{}",
    }


def test_a_resumed_run_continues_the_run_behind_its_last_step(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6))
    write(tmp_path, range(4, 9), statistics=False)
    client, (run,) = read(tmp_path)
    assert history(client, run, "loss") == [*((step, 100 + step) for step in range(1, 6)), (6, 406), (7, 407), (8, 408)]
    assert history(client, run, "val_loss") == [(3, 1.5), (6, 3.0)]
    assert [step for step, _ in history(client, run, "statistics/blocks.0.moe.router.load/0")] == [1, 2, 3, 4, 5]
    assert run.info.status == "FINISHED"


def test_a_run_that_resumes_with_another_store_begins_a_run_there(tmp_path: Path) -> None:
    write(tmp_path, range(1, 3))
    write(tmp_path, range(3, 5), tracking_uri=str(tmp_path / "other"), run_name="again")
    client, (run,) = read(tmp_path, str(tmp_path / "other"))
    assert run.info.run_name == "again"
    assert history(client, run, "loss") == [(3, 303), (4, 304)]


def test_every_nth_step_and_every_evaluated_step_is_written_by_rank_0(tmp_path: Path) -> None:
    write(tmp_path, range(1, 9), every=4, rank=1)
    assert list(tmp_path.iterdir()) == []
    write(tmp_path, range(1, 9), every=4)
    client, (run,) = read(tmp_path)
    assert [step for step, _ in history(client, run, "loss")] == [3, 4, 6, 8]


def trained(directory: Path, **settings: Any) -> Any:
    own = {"tracking_uri": str(directory / "store"), **settings}
    run = prepare(tiny_config({"trainer.steps": 3, "extensions.mlflow": own}), {f"{HOST}metrics": MetricsFile()})
    run.directory = directory
    train(run)
    return run


def test_a_run_of_the_loop_is_written_and_more_metrics_than_a_request_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST_METRICS == 1000
    monkeypatch.setattr("mplug_mlflow.writer.MOST_METRICS", 4)
    trained(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    client, (run,) = read(tmp_path)
    assert len(lines) == 3
    for name in ("loss", "grad_norm", "lr", "tokens", "step_s", "memory_gib"):
        assert history(client, run, name) == [(line["step"], line[name]) for line in lines]
    assert not [thread for thread in threading.enumerate() if thread.name == "mlflow"]


@pytest.mark.parametrize("method", ["create_run", "log_batch"])
def test_a_failure_of_the_server_is_reported_once_and_the_run_goes_on(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("no server")

    monkeypatch.setattr(MlflowClient, method, refuse)
    assert trained(tmp_path).step == 3
    assert capsys.readouterr().err.count("extensions/mlflow") == 1
    assert (tmp_path / "logs" / "rank0.log").read_text().count("the run continues") == 1


def test_a_server_that_does_not_answer_delays_only_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(MlflowClient, "log_batch", lambda *_, **__: answers.wait())
    begun = time.monotonic()
    assert trained(tmp_path, end_seconds=0.1).step == 3
    assert time.monotonic() - begun < 60
    answers.set()
    assert "extensions/mlflow" in capsys.readouterr().err
    assert "did not take the last steps within 0.1 s" in (tmp_path / "logs" / "rank0.log").read_text()


def test_a_run_that_fails_is_marked(tmp_path: Path) -> None:
    plugin = MLflow(MLflow.Config(tracking_uri=str(tmp_path / "store")))
    config = SimpleNamespace(resolved=dict)
    plugin.run_started(SimpleNamespace(rank=0, directory=tmp_path, config=config))  # type: ignore[arg-type]
    plugin.run_failed()
    _, (run,) = read(tmp_path)
    assert run.info.status == "FAILED"


def test_a_run_without_the_library_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mplug_mlflow.find_spec", lambda _: None)
    with pytest.raises(UsageError, match="needs the package 'mlflow'; pip install mlflow"):
        MLflow(MLflow.Config()).configure()
