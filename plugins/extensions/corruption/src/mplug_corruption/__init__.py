"""Silent data corruption: copies of weights and optimizer states that must be equal, compared between ranks."""

import logging
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from mplug import RunError, hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mplug import Model, Optimizer, Piece, Run
    from mplug_corruption.copies import Comparison, Copies

log = logging.getLogger("mplug")
REMEDY = (
    "the memory or the arithmetic of a machine is faulty: exclude it, and continue from a checkpoint of an earlier "
    "step (extensions.corruption.action=stop)"
)


class Corruption:
    """Compares the copies of every weight, master and optimizer state between the ranks that hold them, now and then.

    Ranks with the same part of a parameter (data-parallel replicas, norms under tensor parallelism, tied weights on two
    stages) hold equal bits. A rank whose memory or arithmetic is faulty does not.
    """

    class Config(BaseModel):
        """How often to compare, and what a difference means."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        every: PositiveInt = Field(100, description="compare after each step whose number is a multiple of this one")
        action: Literal["stop", "warn"] = Field(
            "stop",
            description="what a difference does: 'stop' ends the run; 'warn' reports it once and continues",
        )
        states: bool = Field(True, description="also compare the masters and the states of the optimizer")

    def __init__(self, config: Config) -> None:
        self.config = config
        self.copies: Copies | None = None
        self._launched: tuple[int, Comparison] | None = None
        self._failure: Exception | None = None
        self._is_first = False
        self._reported: set[str] = set()

    @hookimpl
    def training_built(self, run: "Run", model: "Model", pieces: "list[Piece]", optimizer: "Optimizer") -> None:
        """Find what must be equal between ranks."""
        from mplug_corruption.copies import Copies

        self._is_first = run.rank == 0
        self.copies = Copies(run, model, pieces if self.config.states else [], optimizer)
        unit = model.own_units[0]
        part = model.module.get_submodule(unit.name)
        setattr(part, unit.method, partial(self._unless_failed, getattr(part, unit.method)))

    @hookimpl
    def training_released(self) -> None:
        """Drop them."""
        self.copies = None

    @hookimpl
    def step_started(self, run: "Run") -> None:
        """Launch a comparison of what the last step has left. On a GPU, the CPU does not wait. Collective."""
        if self.copies is not None and run.step > 1 and (run.step - 1) % self.config.every == 0:
            try:
                self._launched = run.step - 1, self.copies.compare()
            except Exception as error:  # for which the host ends no run; the first unit raises it
                self._failure = error.with_traceback(None)  # which would keep process groups, and their connections

    def _unless_failed(self, call: "Callable[..., Any]", *inputs: Any, **optional: Any) -> Any:
        """The first unit of this rank, unless a comparison has failed.

        A rank that has died breaks it. In the passes, this rank would wait for others that still compare.
        """
        if self._failure is not None:
            raise self._failure
        return call(*inputs, **optional)

    @hookimpl
    def step_figures(self) -> "Mapping[str, float] | None":
        """Read the comparison that is complete: `corrupted_copies`, the number of parts whose copies differ.

        On a GPU, the device runs the next step. Collective if copies differ.
        """
        if self._launched is None:
            return None
        (step, comparison), self._launched = self._launched, None
        found = comparison.differences()
        sentences = [sentence for sentence in found if sentence not in self._reported]
        self._reported.update(sentences)
        for sentence in sentences:
            log.error("silent corruption after step %d: %s", step, sentence)
        if found and self.config.action == "stop":
            raise RunError(f"after step {step}, {found[0]}{_more(len(found))}; {REMEDY}")
        if sentences and self._is_first:
            print(f"mplug: after step {step}, {sentences[0]}{_more(len(sentences))}", file=sys.stderr, flush=True)
        return {"corrupted_copies": float(len(found))}


def _more(number: int) -> str:
    return "" if number < 2 else f" (and {number - 1} more tensors: logs/rank0.log)"
