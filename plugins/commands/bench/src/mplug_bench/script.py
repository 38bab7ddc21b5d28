"""Scripts that take part in a measurement: each reads its task as JSON on stdin, and prints JSON as its last line.

`benchmarks/yardstick.py` is an example; its docstring describes input and output.
"""

import json
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mplug import Run, RunError, UsageError
from mplug.commands import Signals, Stopped, listed

if TYPE_CHECKING:
    from mplug import Model


@dataclass(frozen=True)
class Script:
    """A script, and the assignments that change the run's settings for it."""

    path: Path
    assignments: tuple[str, ...]

    @classmethod
    def read(cls, words: str) -> "Script":
        """Parse 'SCRIPT [FIELD=VALUE ...]'; UsageError if the script does not exist."""
        try:
            path, *assignments = shlex.split(words) or [""]
        except ValueError as error:
            raise UsageError(f"--against {words!r} cannot be parsed: {error}; correct the quotes") from None
        if not Path(path).is_file():
            raise UsageError(f"--against '{path}': this file does not exist; set the path of a script")
        return cls(Path(path), tuple(assignments))

    def ask(self, task: dict[str, Any], **steps: int) -> dict[str, Any]:
        """The script's answer. If the script fails, raises RunError with the error that it printed to stderr."""
        request = {**task, "warmup": 0, "steps": 0, "profile": 0, **steps}
        process = subprocess.Popen(
            [sys.executable, str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process, _Ending(process) as ending:
            output, errors = process.communicate(json.dumps(request))
        if ending.signal is not None:
            raise Stopped(ending.signal)
        if process.returncode:
            raise RunError(f"'{self.path}' ended with status {process.returncode}: {_error_line(errors)}")
        expected = ("parameters", "flops", *(("seconds", "memory_gib") if request["steps"] else ()))
        answer = _object(_last_line(output))
        if not answer.keys() >= set(expected):
            raise RunError(
                f"the output of '{self.path}' must end with a line of JSON with the keys {listed(expected)}; it ended "
                f"with: {_last_line(output)[:200]}"
            )
        return answer


def task_of(run: Run, model: "Model") -> dict[str, Any]:
    """The task of a script: the settings of a run of one process, whose model is on the meta device.

    It contains `model.frozen` only if that is not empty, so that a script without support for it can refuse it.
    """
    trainer, resolved = run.config.trainer, run.config.resolved()
    core = next((filled for filled in model.slots if filled.site.slot == "Attention.core"), None)
    return {
        "model": {name: value for name, value in resolved["model"].items() if name != "frozen" or value},
        "optimizer": resolved["optimizer"],
        "seq_length": trainer.seq_length,
        "micro_batch_size": run.micro_batch_size,
        "micro_batches": trainer.global_batch_size // run.micro_batch_size,
        "max_grad_norm": trainer.max_grad_norm,
        "seed": trainer.seed,
        "precision": trainer.precision,
        "device": run.device,
        "attention": core and core.supplier.rpartition("/")[2],
        "attention_by": core and core.offer and core.offer.note(core.site, run),
        "deterministic": trainer.deterministic,
        "compile": trainer.compile,
    }


class _Ending(Signals):
    """Ends the script when this process receives SIGINT or SIGTERM."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def first(self, number: int) -> None:
        """Send SIGTERM to the script."""
        self.process.terminate()

    def later(self, number: int) -> None:
        """Kill the script."""
        self.process.kill()


def _error_line(stderr: str) -> str:
    """The last line that names an exception, or else the last line."""
    errors = re.findall(r"^[\w.]+(?:Error|Exception): .*$", stderr, re.MULTILINE)
    return str(errors[-1]) if errors else _last_line(stderr)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "nothing"


def _object(text: str) -> dict[str, Any]:
    """The JSON object in `text`; empty if the text is not one."""
    with suppress(ValueError):
        value = json.loads(text)
        return value if isinstance(value, dict) else {}
    return {}
