"""Measure the steps of a run as `mplug train` executes them, without logs, evaluation or checkpoints."""

import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mplug import Run, RunError, UsageError
from mplug.commands import (
    Registry,
    Send,
    Settings,
    among,
    default_settings,
    launch,
    launched,
    merge,
    prepare,
    read_assignments,
    read_file,
    resolve,
    supervisor_of,
)
from mplug_bench.profiling import RECORDED, Event, Profile, profile_of, profiled, waits_of
from mplug_bench.script import Script, task_of

if TYPE_CHECKING:
    from mplug import Model, StepResult
    from mplug_bench.ceilings import Limits


@dataclass(frozen=True)
class Task:
    """The description of a measurement that the command passes to each of its processes: plain data, can be pickled.

    `of_machine` says whether limits have work of usual shapes too, and not only that of the model.
    """

    overrides: Settings
    warmup: int
    steps: int
    profile: bool = False
    of_machine: bool = True


@dataclass(frozen=True)
class Facts:
    """The size of a step, known before it runs.

    `flops` are the FLOPs of a step that count only the unmasked half of causal attention (A = 6); `flops_full` count
    its full square (A = 12). Streams count with the rows that the model's plan estimates.
    """

    tokens: int
    flops: int
    flops_full: int
    world_size: int
    parameters: int
    device: str


@dataclass(frozen=True)
class Measured(Facts):
    """The figures of one participant over all its rounds.

    `rounds` are the seconds of every step, one list per round; `memory_gib` is the maximum over all ranks. `waits` has
    the places where the CPU waits for the GPU in a step, with the number of times; None if that was not measured.
    `figures` are those that the stepper measures itself (the bubble of a pipeline), of the first round: the median over
    its steps, and the mean over ranks.
    """

    peak_tflops: float | None
    memory_gib: float
    rounds: list[list[float]]
    profile: Profile | None = None
    waits: dict[str, int] | None = None
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> list[float]:
        """The seconds of every step of all rounds."""
        return [seconds for steps in self.rounds for seconds in steps]

    @property
    def step(self) -> float:
        """The median of `seconds`."""
        return statistics.median(self.seconds)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.step / self.world_size

    def tflops(self, flops: int) -> float:
        """TFLOP/s per GPU, for a step of `flops` FLOPs."""
        return flops / self.step / 1e12 / self.world_size

    @property
    def mfu(self) -> float | None:
        """The fraction of the chip's dense bf16 peak (A = 6); None if the peak is unknown."""
        return self.tflops(self.flops) / self.peak_tflops if self.peak_tflops else None

    def ratios(self, other: "Measured") -> list[float]:
        """The ratio of this participant's tokens per second and GPU to another's, for each round of both."""
        own_rates, other_rates = (
            [side.tokens / side.world_size / statistics.median(steps) for steps in side.rounds]
            for side in (self, other)
        )
        return [own / reference for own, reference in zip(own_rates, other_rates, strict=False)]

    def joined(self, other: "Measured") -> "Measured":
        """These figures together with those of the next round of the same participant."""
        memory = max(self.memory_gib, other.memory_gib)
        waits = other.waits if self.waits is None else self.waits
        rounds, profile = self.rounds + other.rounds, self.profile or other.profile
        return replace(self, rounds=rounds, memory_gib=memory, profile=profile, waits=waits)


def bench_settings() -> Settings:
    """The settings of the default run, changed for measurements (bench.yaml)."""
    return merge(default_settings(), read_file(Path(__file__).with_name("bench.yaml"), "bench.yaml"))


def checked(changes: Settings) -> "tuple[Run, Model]":
    """The prepared run, and its model on the meta device; UsageError if the config is invalid or cannot be built."""
    run = prepare(resolve(Registry(), bench_settings(), changes))
    from mplug.commands import build_model  # imports torch, so only after the config is valid

    return run, build_model(run)


def facts_of(run: Run, model: "Model") -> Facts:
    """The facts of a step of a run."""
    samples, length, flops = run.config.trainer.global_batch_size, run.config.trainer.seq_length, model.flops
    of_tokens = flops.of(samples * length, samples * length**2)
    of_streams = sum(
        model.stream_passes[name].flops.of(samples * stream.rows, samples * stream.squares)
        for stream in model.plan.streams.values()
        for name in stream.lengths
        if name in model.stream_passes and name in run.entries
    )
    masked = flops.per_squared_length * samples * length**2 if _is_causal(model) else 0
    return Facts(
        tokens=samples * length,
        flops=of_tokens + of_streams,
        flops_full=of_tokens + of_streams + masked,
        world_size=run.mesh.world_size,
        parameters=sum(placement.numel for placement in model.placements.values()),
        device=run.device,
    )


def _is_causal(model: "Model") -> bool:
    """Whether no position of a sequence of tokens sees a later one."""
    from mplug_nn import AttentionSpec  # imports torch

    of_streams = tuple(f"{unit.name}." for unit in model.plan.units if unit.sequence in model.plan.streams)
    sites = [slot.site for slot in model.slots if not slot.site.name.startswith(of_streams)]
    specs = [getattr(site.module, "spec", None) for site in sites]
    return all(spec.causal or spec.cross for spec in specs if isinstance(spec, AttentionSpec))


# A variant's turn, in processes of its own.


def turn(task: Task) -> Measured:
    """Measure one round of a variant."""
    run = _prepared(task)
    result: Measured = launch(run.mesh.world_size, _measure, task, supervisor=supervisor_of(run))
    return result


def limits(task: Task) -> "Limits":
    """Measure the limits of the machine, and the time of a variant's work at these limits."""
    run = _prepared(task)
    result: Limits = launch(run.mesh.world_size, _limits, task, supervisor=supervisor_of(run))
    return result


def _prepared(task: Task) -> Run:
    return prepare(resolve(Registry(), bench_settings(), task.overrides))


@contextmanager
def _running(task: Task, send: Send) -> Iterator[Run]:
    """Make this process one of a measurement for the block."""
    run = _prepared(task)
    from mplug.commands import choose_device  # imports torch, so only after the config is valid

    run.device = choose_device(run.config)
    with among(launched(), run, supervisor_of(run), send):
        yield run


def _measure(task: Task, send: Send) -> Measured:
    """Measure one round in this process; `send` receives the number of every step."""
    with _running(task, send) as run:
        from mplug.commands import build, launch_step, peak_memory_gib, peak_tflops
        from mplug_compile import compiled_graphs
        from mplug_estimates import timed

        parts, config, results = build(run), run.config, list["StepResult"]()

        def step() -> None:
            run.step += 1
            send(run.step)
            samples, optimizer = config.trainer.global_batch_size, config.optimizer
            results.append(launch_step(run, parts, samples, optimizer.lr, optimizer.weight_decay)[0])
            del results[: -task.steps]

        for _ in range(task.warmup):
            step()
        compiled, recorded = compiled_graphs(), _recorded(parts.stepper)
        seconds = timed(step, task.steps, run.device)
        if _recorded(parts.stepper) > recorded:
            raise RunError("mplug recorded a CUDA graph during the measured steps; use a larger --warmup")
        if compiled_graphs() > compiled:
            raise RunError(
                f"torch compiled {compiled_graphs() - compiled} graphs during the measured steps; use a larger --warmup"
            )
        figures = _mean(run.gathered(_medians([result.measured() for result in results if result.measured])))
        memory = max(run.gathered(peak_memory_gib(run.device)))
        profile = profiled(step, run.device) if task.profile else None
        waits = waits_of(step, run.device) if task.profile else None
        peak = peak_tflops(run.device)
        return Measured(
            **asdict(facts_of(run, parts.model)),
            peak_tflops=peak,
            memory_gib=memory,
            rounds=[seconds],
            profile=profile,
            waits=waits,
            figures=figures,
        )


def _medians(steps: list[Mapping[str, float]]) -> dict[str, float]:
    """The medians of figures of several steps."""
    return {name: statistics.median(one[name] for one in steps) for name in (steps[0] if steps else {})}


def _mean(ranks: list[dict[str, float]]) -> dict[str, float]:
    """The means of figures over the ranks that have them."""
    names = dict.fromkeys(name for own in ranks for name in own)
    return {name: statistics.fmean(own[name] for own in ranks if name in own) for name in names}


def _recorded(stepper: Any) -> int:
    """The number of CUDA graphs that a stepper has recorded so far."""
    return int(getattr(stepper, "num_recorded", 0))


def _limits(task: Task, send: Send) -> "Limits":
    with _running(task, send) as run:
        from mplug_bench.ceilings import ceilings

        return ceilings(run, task.of_machine)


# A script's turn.


@dataclass(frozen=True)
class Opponent:
    """A script that takes part in a measurement; `task` is its input, the same work as every variant."""

    script: Script
    task: dict[str, Any]
    facts: Facts

    @property
    def name(self) -> str:
        """The name of its row and its turns."""
        return self.script.path.name

    @classmethod
    def of(cls, script: Script, base: Settings, variants: dict[str, Facts]) -> "Opponent":
        """The script with the run's settings and its own; UsageError if it is not comparable with a variant."""
        run, model = checked(merge(base, read_assignments(script.assignments, "--against")))
        facts = facts_of(run, model)
        for name, of_run in ((str(script.path), facts), *((shown(name), each) for name, each in variants.items())):
            if of_run.world_size > 1:
                raise UsageError(
                    f"--against compares runs of one process, and '{name}' needs {of_run.world_size}; remove --against"
                )
        opponent = cls(script, task_of(run, model), facts)
        opponent._refuse_other_work(script.ask(opponent.task), variants)
        return opponent

    def _refuse_other_work(self, answer: dict[str, Any], variants: dict[str, Facts]) -> None:
        for name, facts in variants.items():
            for figure, expected in (("parameters", facts.parameters), ("flops", facts.flops)):
                if answer[figure] != expected:
                    raise UsageError(
                        f"'{self.script.path}' reports {answer[figure]:,} {figure}, and '{shown(name)}' has "
                        f"{expected:,}, so they do not compute the same; set the script's settings by --against "
                        f"'{self.name} FIELD=VALUE'"
                    )

    def turn(self, task: Task, peak_tflops: float | None) -> Measured:
        """Measure one round of the script; `peak_tflops` is the peak of the chip."""
        answer = self.script.ask(
            self.task, warmup=task.warmup, steps=task.steps, profile=RECORDED if task.profile else 0
        )
        events = [Event(*event) for event in answer.get("events", ())]
        profile = profile_of(events) if events else None
        memory, rounds = answer["memory_gib"], [answer["seconds"]]
        return Measured(
            **asdict(self.facts), peak_tflops=peak_tflops, memory_gib=memory, rounds=rounds, profile=profile
        )


# Output.


def shown(variant: str) -> str:
    """The name of a variant in the output."""
    return variant or "unchanged"


def as_json(
    facts: dict[str, Facts], variants: dict[str, Measured], limits: "dict[str, Limits]", opponent: Measured | None
) -> dict[str, Any]:
    """All figures, for a file; a variant whose limits alone were measured has its facts instead of steps."""
    figures = {name: _figures(variants[name]) if name in variants else asdict(fact) for name, fact in facts.items()}
    for name, of_variant in limits.items():
        figures[name]["limits"] = asdict(of_variant)
    if opponent is None:
        return {"variants": figures}
    for name, measured in variants.items():
        figures[name]["ratios_against"] = measured.ratios(opponent)
    return {"variants": figures, "against": _figures(opponent)}


def _figures(measured: Measured) -> dict[str, Any]:
    return {
        **asdict(measured),
        "median_s": measured.step,
        "tokens_per_s_per_gpu": measured.tokens_per_s,
        "tflops_a6": measured.tflops(measured.flops),
        "tflops_a12": measured.tflops(measured.flops_full),
        "mfu_a6": measured.mfu,
    }
