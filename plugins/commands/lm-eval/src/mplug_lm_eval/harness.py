"""Runs tasks of lm-evaluation-harness, and writes its results."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mplug import RunError, UsageError
from mplug_faults import cause_of

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from mplug_lm_eval.engine import Engine
    from mplug_lm_eval.wanted import Wanted


def run_tasks(wanted: "Wanted", engine: "Engine") -> dict[str, Any]:
    """The results of tasks, as the harness states them. UsageError for unknown tasks, RunError if the harness fails."""
    from lm_eval.evaluator import simple_evaluate

    from mplug_lm_eval.language_model import MplugLM

    manager, names = find_tasks(wanted.tasks, wanted.include_paths)
    os.environ["DISABLE_MULTIPROC"] = "1"  # else the harness forks this process, with its threads, to resample
    try:
        results = simple_evaluate(
            model=MplugLM(engine, wanted.seed),
            tasks=names,
            num_fewshot=wanted.num_fewshot,
            limit=wanted.limit,
            batch_size=engine.batch_size,
            task_manager=manager,
            gen_kwargs=wanted.gen_kwargs or None,
            log_samples=wanted.log_samples,
            bootstrap_iters=wanted.bootstrap_iters,
            random_seed=wanted.seed,
            numpy_random_seed=wanted.seed,
            torch_random_seed=wanted.seed,
            fewshot_random_seed=wanted.seed,
        )
    except (UsageError, RunError):
        raise
    except Exception as error:
        raise RunError(
            f"lm-evaluation-harness fails with the tasks {', '.join(names)}: {cause_of(error)}; the data of its "
            f"tasks must be on this machine, or in reach"
        ) from error
    assert results is not None
    found: dict[str, Any] = results
    return found


def find_tasks(tasks: tuple[str, ...], include_paths: tuple[Path, ...]) -> "tuple[TaskManager, list[str]]":
    """The harness's index of tasks, and the names of these tasks; UsageError for a pattern that matches none.

    The index of the harness's own thousands of tasks takes seconds, so it is made only if the folders lack a task.
    """
    from lm_eval.tasks import TaskManager

    folders = [str(path) for path in include_paths]
    managers = (TaskManager(include_path=folders or None, include_defaults=own) for own in (False, True)[not folders :])
    for manager in managers:
        found = {task: manager.match_tasks([task]) for task in tasks}
        if all(found.values()):
            return manager, list(dict.fromkeys(name for names in found.values() for name in names))
    missing = next(task for task in tasks if not found[task])
    raise UsageError(
        f"--tasks: lm-evaluation-harness has no task '{missing}'; 'lm-eval ls tasks' lists its tasks, and "
        f"--include-path adds a folder with own ones"
    )


def table_of(results: dict[str, Any]) -> str:
    """The harness's table of results."""
    from lm_eval.utils import make_table

    tables = [make_table(results)]
    if results.get("groups"):
        tables.append(make_table(results, "groups"))
    return "\n".join(tables)


def as_json(results: dict[str, Any]) -> str:
    """The results as the harness writes them."""
    from lm_eval.utils import handle_non_serializable

    return json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False) + "\n"
