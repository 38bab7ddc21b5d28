"""Measuring: the steps of a run by themselves, as `mplug train` does them, without logs, evaluation or checkpoints."""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from mplug.job import among
from mplug.launch import launched
from mplug.registry import Registry
from mplug.resolve import default_settings, resolve
from mplug.run import Run, prepare
from mplug.settings import Settings, merge, read_file


@dataclass(frozen=True)
class Task:
    """What every process of a measurement needs to know; it travels as plain data."""

    overrides: Settings
    warmup: int
    steps: int
    profile: bool = False


@dataclass
class Measured:
    """The figures of one variant over all its rounds. Times are seconds; memory is the largest of any rank's, in GiB.

    `flops` are those of a step, causal attention counted once (A = 6); `flops_full` count the square (A = 12).
    """

    tokens: int
    flops: int
    flops_full: int
    world_size: int
    parameters: int
    device: str
    peak_tflops: float | None
    memory_gib: float
    seconds: list[float]
    classes: dict[str, float] = field(default_factory=dict)

    @property
    def step(self) -> float:
        """The median step."""
        return statistics.median(self.seconds)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second and GPU."""
        return self.tokens / self.step / self.world_size

    def tflops(self, flops: int) -> float:
        """TFLOP/s of a GPU."""
        return flops / self.step / 1e12 / self.world_size

    @property
    def mfu(self) -> float | None:
        """The fraction of the chip's dense bf16 peak (A = 6); None where the peak is not known."""
        return self.tflops(self.flops) / self.peak_tflops if self.peak_tflops else None

    def joined(self, other: "Measured") -> "Measured":
        """This and another round of the same variant."""
        memory = max(self.memory_gib, other.memory_gib)
        return Measured(**{**asdict(self), "seconds": self.seconds + other.seconds, "memory_gib": memory})


def bench_settings() -> Settings:
    """The default run as measurements change it."""
    return merge(default_settings(), read_file(Path(__file__).with_name("bench.yaml"), "bench.yaml"))


def measure(task: Task, tell: Callable[[int], None]) -> Measured:
    """Be one process of a measurement. `tell` hears the number of every step."""
    run = prepare(resolve(Registry(), bench_settings(), task.overrides))
    from mplug.build import choose_device  # torch comes in only when the config is right

    run.device = choose_device(run.config)
    with among(launched(), run):
        return _measured(run, task, tell)


def _measured(run: Run, task: Task, tell: Callable[[int], None]) -> Measured:
    from mplug.build import build
    from mplug.hardware import Moment, peak_memory_gib, peak_tflops
    from mplug.profiling import by_class

    parts, trainer = build(run), run.config.trainer

    def step() -> None:
        run.step += 1
        tell(run.step)
        parts.stepper.forward_backward(parts.train_loader.take(trainer.global_batch_size), run.step)
        parts.stepper.update(run.config.optimizer.lr, run.config.optimizer.weight_decay)
        run.hooks.call.parameters_updated(run=run)

    for _ in range(task.warmup):
        step()
    moments = [Moment(run.device)]
    for _ in range(task.steps):
        step()
        moments.append(Moment(run.device))
    moments[-1].wait()
    samples, length, flops = trainer.global_batch_size, trainer.seq_length, parts.model.plan.flops
    return Measured(
        tokens=samples * length,
        flops=flops.of(samples * length, samples * length**2),
        flops_full=flops.of(samples * length, 2 * samples * length**2),
        world_size=run.mesh.world_size,
        parameters=parts.num_parameters,
        device=run.device,
        peak_tflops=peak_tflops(run.device),
        memory_gib=max(run.gathered(peak_memory_gib(run.device))),
        seconds=[after.since(before) for before, after in pairwise(moments)],
        classes=by_class(step, run.device) if task.profile else {},
    )


def as_json(variants: dict[str, Measured], limits: dict[str, float]) -> dict[str, Any]:
    """All figures, for a file."""
    found = {
        name: {
            **asdict(one),
            "median_s": one.step,
            "tokens_per_s_per_gpu": one.tokens_per_s,
            "tflops_a6": one.tflops(one.flops),
            "tflops_a12": one.tflops(one.flops_full),
            "mfu_a6": one.mfu,
        }
        for name, one in variants.items()
    }
    return {"variants": found, "limits": limits}
