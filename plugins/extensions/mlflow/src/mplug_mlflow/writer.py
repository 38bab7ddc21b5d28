"""The thread that writes to MLflow, and the run of MLflow to which it writes."""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunStatus
from mlflow.tracking import get_tracking_uri

from mplug import write_whole

FILE = "mlflow.json"
"""The file in the run's folder that says which run of MLflow belongs to it."""
MOST_METRICS, MOST_PARAMETERS, LONGEST = 1000, 100, 500
"""The limits of MLflow's interface: metrics and parameters of one request, and characters of a parameter's value."""


@dataclass(frozen=True)
class Target:
    """What a new run of MLflow gets. `settings` is the run's config, nested mappings."""

    tracking_uri: str | None
    experiment: str
    name: str
    tags: Mapping[str, str]
    settings: Mapping[str, Any]


class Writer:
    """Writes the numbers of steps in a thread, in order; the first request of the thread begins the run of MLflow.

    After an error of the library, the thread ends, and the next call of `write` or `end` raises the error.
    """

    def __init__(self, target: Target, directory: Path) -> None:
        self._steps: SimpleQueue[list[Metric] | str] = SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, args=(target, directory), daemon=True, name="mlflow")
        self._thread.start()

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Hand over the numbers of a step; raises the error of an earlier request."""
        self._raise_error()
        now = int(time.time() * 1000)
        self._steps.put([Metric(name, value, now, step) for name, value in numbers.items()])

    def end(self, status: str, seconds: float) -> None:
        """Write what is left, and end the run of MLflow. Raises TimeoutError after so many seconds."""
        self._steps.put(status)
        self._thread.join(seconds)
        self._raise_error()
        if self._thread.is_alive():
            raise TimeoutError(
                f"MLflow did not take the last steps within {seconds:g} s (extensions.mlflow.end_seconds)"
            )

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _work(self, target: Target, directory: Path) -> None:
        try:
            session = Session(target, directory)
            while not isinstance(waiting := self._take(), str):
                session.write(waiting)
            session.end(waiting)
        except Exception as error:  # the main thread raises it
            self._error = error

    def _take(self) -> list[Metric] | str:
        """The numbers of all steps that wait, or the status with which the run ends."""
        found = self._steps.get()
        if isinstance(found, str):
            return found
        while not self._steps.empty():
            more = self._steps.get()
            if isinstance(more, str):
                self._steps.put(more)
                break
            found += more
        return found


class Session:
    """A run of MLflow. If the run's folder has the id of one, it continues after the last step that MLflow has."""

    def __init__(self, target: Target, directory: Path) -> None:
        uri = target.tracking_uri or get_tracking_uri()
        self.client, self.last = MlflowClient(tracking_uri=uri), 0
        found = self._continued(directory / FILE, uri)
        self.run = found if found is not None else self._begun(directory / FILE, uri, target)

    def _continued(self, path: Path, uri: str) -> str | None:
        """The id in the file, if it belongs to this store. Its steps are not written again."""
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if known.get("tracking_uri") != uri:
            return None
        run: str = known["run_id"]
        self.client.update_run(run, status=RunStatus.to_string(RunStatus.RUNNING))
        self.last = max((metric.step for metric in self.client.get_metric_history(run, "loss")), default=0)
        return run

    def _begun(self, path: Path, uri: str, target: Target) -> str:
        experiment = self.client.get_experiment_by_name(target.experiment)
        number = self.client.create_experiment(target.experiment) if experiment is None else experiment.experiment_id
        run: str = self.client.create_run(number, run_name=target.name, tags=dict(target.tags)).info.run_id
        write_whole(path, json.dumps({"tracking_uri": uri, "run_id": run}) + "\n")
        parameters = [Param(name, text) for name, text in _parameters(target.settings)]
        for part in _parts(parameters, MOST_PARAMETERS):
            self.client.log_batch(run, params=part)
        return run

    def write(self, metrics: Sequence[Metric]) -> None:
        """Write the numbers of steps that MLflow does not have yet."""
        for part in _parts([one for one in metrics if one.step > self.last], MOST_METRICS):
            self.client.log_batch(self.run, metrics=part)

    def end(self, status: str) -> None:
        """End the run."""
        self.client.set_terminated(self.run, status=status)


def _parts(values: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(values), most):
        yield values[start : start + most]


def _parameters(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(field, value as text) of each setting."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _parameters(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", (value if isinstance(value, str) else json.dumps(value))[:LONGEST]
