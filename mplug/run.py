"""One run: its config, hooks, mesh and directory. Every hook receives it. Also its record (`record.json`)."""

import hashlib
import json
import logging
import math
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mplug.asking import asking
from mplug.config import RunConfig
from mplug.contracts import Variance
from mplug.errors import UsageError, listed, printable, suggest
from mplug.files import write_whole
from mplug.heartbeats import Pulse
from mplug.hooks import Hooks
from mplug.mesh import Axis, Mesh, contiguous, view_sizes
from mplug.settings import source_of
from mplug.sizes import refuse_too_many_ranks
from mplug.toolchain import triton_builds
from mplug.version import __version__

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from mplug.groups import Groups
    from mplug.lock import Claim

RUNS = Path("runs")


@dataclass
class Run:
    """The run that every hook receives. `step` is the number of the current step; the first is 1."""

    config: RunConfig
    hooks: Hooks
    mesh: Mesh
    device: str
    rank: int = 0
    directory: Path | None = None
    step: int = 0
    stop_requested: bool = False
    groups: "Groups | None" = None
    claim: "Claim | None" = None
    """The lock of the directory, on rank 0 of a run that a command has started."""
    pulse: Pulse = field(default_factory=Pulse)
    """The current activity of this process; heartbeats report it."""
    entries: frozenset[str] = frozenset()
    """The optional entries of the loader's micro batches."""
    depends_on_layout: tuple[str, ...] = ()
    """What in the run depends on the layout, as sentences; set when a training process is built."""

    @cached_property
    def variances(self) -> dict[str, Variance]:
        """By plugin label, how the run differs from the run of one process, as plugins declare it (`varies`)."""
        return dict(self.hooks.each("varies", config=self.config))

    def group(self, *axes: str, use: str = "") -> "ProcessGroup | None":
        """The process group of this rank along mesh axes; None if the rank is alone or no processes run yet.

        Collectives of one group wait for each other. A different `use` gives a separate group for the same ranks: then
        a collective that backward needs does not queue behind a gradient sum (axes of two views can have the same
        ranks).

        Collective: all ranks must call it in the same order, because all ranks take part in making a group.
        """
        if self.groups is None:
            return None
        return self.groups.of((self.mesh.group(rank, *axes) for rank in range(self.mesh.world_size)), use)

    @property
    def compiler(self) -> str | None:
        """The name of torch.compile's backend for the model's units; None leaves them eager.

        'auto' is inductor on a GPU for which it can build kernels.
        """
        wanted = self.config.trainer.compile
        if wanted == "auto":
            return "inductor" if self.device.startswith("cuda") and triton_builds() else None
        return None if wanted == "never" else wanted

    @property
    def micro_batch_size(self) -> int:
        """Number of samples of one forward and backward pass on a rank."""
        trainer, (_, shards) = self.config.trainer, self.mesh.batch_shard(self.rank)
        return trainer.micro_batch_size or trainer.global_batch_size // shards

    @property
    def counts_losses(self) -> bool:
        """Whether this rank's losses count; of ranks that compute the same losses, only the first one's do."""
        own = self.mesh.coordinates(self.rank)
        return all(
            own[axis.name] == 0
            for axis in self.mesh.views["attention"]
            if not axis.entries and "units" not in axis.activations
        )

    def summed(self, values: "Tensor") -> "Tensor":
        """The sum of a small tensor over all ranks."""
        if self.groups is None:
            return values
        from mplug.ops import all_reduce  # imports torch

        return all_reduce(values, self.groups.of([tuple(range(self.mesh.world_size))]))

    def gathered(self, value: Any) -> list[Any]:
        """The values of all ranks (small plain data), in rank order."""
        if self.groups is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.mesh.world_size
        dist.all_gather_object(values, value)
        return values

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        assert self.directory is not None
        return self.directory / "checkpoints"


def prepare(
    config: RunConfig,
    host_plugins: dict[str, object] | None = None,
    directory: Path | None = None,
    world_size: int | None = None,
) -> Run:
    """Instantiate the chosen plugins, let them check the config, and make the mesh. Imports no torch.

    The default of `world_size` is the smallest number of ranks that every view of the mesh divides. The strategy of
    `parallel.data` takes the ranks that the layout's own axes do not use; the layout in the run's config then names it.
    """
    hooks = _hooks_of(config, host_plugins)
    problems = []
    for label, check in hooks.layered("configure"):
        try:
            with asking(label, "configure"):
                check(config=config)
        except UsageError as error:
            problems.append(str(error))
    if problems:
        raise UsageError("\n".join(problems))
    answers = _answered_axes(hooks, config)
    _refuse_rest_without_data(config)
    axes, degrees = _named_apart(answers), config.parallel.degrees
    if degrees and not axes:
        raise UsageError(f"none of the strategies {listed(degrees)} adds an axis to the mesh")
    sizes = view_sizes(axes)
    ranks = world_size or math.lcm(*sizes.values())
    refuse_too_many_ranks(config, ranks)
    mesh = Mesh.of(axes, ranks)
    if ranks > sizes["attention"]:
        return prepare(_with_rest(config, axes, ranks), host_plugins, directory, ranks)
    _refuse_uneven_batch(config, mesh)
    _refuse_uneven_sequence(config, mesh)
    entries = frozenset(hooks.call.batch_entries(config=config) or ())
    run = Run(config, hooks, mesh, device=config.trainer.device, directory=directory, entries=entries)
    _refuse_wrong_variances(run)
    return run


def _refuse_wrong_variances(run: Run) -> None:
    for label, variance in run.variances.items():
        if not isinstance(variance, Variance):
            raise UsageError(f"{label} answers 'varies' with {variance!r}; the answer is a mplug.Variance or None")
        for axis in variance.sums:
            if axis not in run.mesh.axes:
                known = list(run.mesh.axes)
                raise UsageError(
                    f"{label} declares that it sums gradients over the axis '{axis}', which the mesh does not "
                    f"have{suggest(axis, known)} (axes: {listed(known)})"
                )


def _with_rest(config: RunConfig, axes: list[Axis], ranks: int) -> RunConfig:
    """The config with a data-parallel strategy over the ranks that the axes of the attention view do not use."""
    sizes, parallel = view_sizes(axes), config.parallel
    if parallel.rest is not None:
        return config.with_rest(ranks // sizes["attention"], f"{ranks} ranks")
    needs = " and ".join(f"{size} of the view '{view}'" for view, size in sizes.items())
    data = f"parallel.data={parallel.data} has a degree there already" if parallel.data else "parallel.data is null"
    raise UsageError(
        f"layout '{parallel.layout}' has {needs} ranks, which fit into {ranks} ranks only with "
        f"{ranks // sizes['attention']} times as many data-parallel ones, and {data}; name them in the layout"
    )


def _hooks_of(config: RunConfig, host_plugins: dict[str, object] | None = None) -> Hooks:
    plugins = dict(host_plugins or {})
    for chosen in config.chosen:
        with asking(chosen.label, "__init__"):
            plugins[chosen.label] = chosen.plugin(chosen.config)
    return Hooks(plugins)


def _answered_axes(hooks: Hooks, config: RunConfig) -> dict[str, list[Axis]]:
    """The axes of all strategies, by their labels."""
    found: dict[str, list[Axis]] = {}
    for label, answer in hooks.layered("mesh_axes"):
        with asking(label, "mesh_axes"):
            found[label] = [*(answer(config=config) or ())]
    return found


def _named_apart(answers: dict[str, list[Axis]]) -> list[Axis]:
    """The axes of all strategies; UsageError if two have the same name."""
    owners: dict[str, str] = {}
    for label, axes in answers.items():
        for axis in axes:
            if axis.name in owners:
                raise UsageError(f"{owners[axis.name]} and {label} both add an axis '{axis.name}'; name one of them")
            owners[axis.name] = label
    return [axis for axes in answers.values() for axis in axes]


def _refuse_rest_without_data(config: RunConfig) -> None:
    """Raise UsageError if the strategy of `parallel.data` does not divide the batch."""
    rest = config.parallel.rest
    if rest is None:
        return
    asked = config.with_rest(2, "parallel.data")
    try:
        axes = _answered_axes(_hooks_of(asked), asked).get(rest.label, [])
    except UsageError:
        return  # the error is about the trial degree 2, which is not the user's
    if not any("batch" in axis.entries for axis in axes):
        source = source_of(config.settings, ("parallel", "data"))
        raise UsageError(
            f"parallel.data ({source}): {rest.label} does not divide the batch, so it is no strategy of data "
            f"parallelism; name one that is, or null, and give {rest.entry.name} a degree in the layout"
        )


def _refuse_uneven_batch(config: RunConfig, mesh: Mesh) -> None:
    trainer, rampup, (_, shards) = config.trainer, config.schedule.batch_rampup, mesh.batch_shard(0)
    sizes = {"trainer.global_batch_size": trainer.global_batch_size}
    if rampup.start is not None:
        sizes |= {"schedule.batch_rampup.start": rampup.start, "schedule.batch_rampup.increment": rampup.increment}
    factors = [f"trainer.micro_batch_size={trainer.micro_batch_size}"] if trainer.micro_batch_size else []
    factors += [f"{shards} data-parallel ranks"] if shards > 1 else []
    least = (trainer.micro_batch_size or 1) * shards
    for name, size in sizes.items():
        if size % least:
            source = source_of(config.settings, tuple(name.split(".")))
            raise UsageError(
                f"{name} ({source}): {size} is no multiple of {' times '.join(factors)}; choose a multiple of {least}"
            )


def _refuse_uneven_sequence(config: RunConfig, mesh: Mesh) -> None:
    """Raise UsageError if the axes cannot divide the sequence: first in batch entries, then inside the model."""
    dividing = [axis for axis in mesh.views["attention"] if axis.divides("sequence")]
    dividing.sort(key=lambda axis: "sequence" not in axis.entries)
    length, names = config.trainer.seq_length, list[str]()
    for axis in dividing:
        names.append(f"{axis.name}={axis.size}")
        try:
            length = sum(map(len, axis.entries.get("sequence", contiguous)(length, axis.size, 0)))
        except UsageError as error:
            source = source_of(config.settings, ("trainer", "seq_length"))
            raise UsageError(
                f"trainer.seq_length ({source}): {listed(names)} cannot divide {config.trainer.seq_length}: {error}; "
                f"change one of them"
            ) from None


# The directory.


def new_directory(config: RunConfig, name: str | None, check: bool = True) -> Path:
    """The directory of a new run; UsageError if a run with this name exists. This function does not create it."""
    if name is not None and (not name or name.startswith(".") or Path(name).name != name):
        raise UsageError(f"--name '{name}' is not the name of a folder; give it without '/' and without a leading '.'")
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    directory = RUNS / (name or f"{config.settings['model', 'name'].value.rpartition('/')[2]}-{stamp}")
    if check and (directory / "config.yaml").exists():
        raise UsageError(f"the run '{directory}' exists; continue it with --resume, or choose another --name")
    return directory


def find_directory(name: str | None) -> Path:
    """The directory of the run called `name`; if it is None, that of the newest run."""
    if name is not None:
        if not (RUNS / name / "config.yaml").is_file():
            known = [path.parent.name for path in _all_runs()][:5]
            raise UsageError(f"there is no run '{name}' in '{RUNS}' (newest there: {listed(known)})")
        return RUNS / name
    runs = _all_runs()
    if not runs:
        raise UsageError(f"there is no run in '{RUNS}'; start one with 'mplug train'")
    return runs[0].parent


def _all_runs() -> list[Path]:
    return sorted(RUNS.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime, reverse=True)


def make_directory(run: Run) -> None:
    """Create the run's directory, and save the fully resolved config on rank 0."""
    assert run.directory is not None
    (run.directory / "logs").mkdir(parents=True, exist_ok=True)
    if run.rank != 0:
        return
    text = yaml.safe_dump(run.config.resolved(), sort_keys=False)
    write_whole(run.directory / "config.yaml", f"# The resolved config of this run: continue it with --resume.\n{text}")


@contextmanager
def logging_to(run: Run) -> Iterator[None]:
    """Write the log messages of the block to this rank's log file."""
    assert run.directory is not None
    logger = logging.getLogger("mplug")
    level, handler = logger.level, _LogFile(run.directory / "logs" / f"rank{run.rank}.log", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()


class _LogFile(logging.FileHandler):
    """A log file that is created with its first line. A write error ends the run instead of printing tracebacks."""

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        raise


# The record.


def provenance(run: Run) -> dict[str, Any]:
    """The distribution, version and source of every plugin; saved with the run and with every checkpoint."""
    plugins = [
        {
            "plugin": chosen.label,
            "distribution": printable(chosen.entry.distribution),
            "version": printable(chosen.entry.version),
            "source": printable(chosen.entry.source),
        }
        for chosen in sorted(run.config.chosen, key=lambda chosen: chosen.label)
    ]
    order = [[plugin["plugin"], plugin["distribution"], plugin["version"]] for plugin in plugins]
    digest = hashlib.sha256(json.dumps(order).encode()).hexdigest()
    return {"mplug": __version__, "torch": version("torch"), "plugins": plugins, "plugins_hash": digest}


def write_record(run: Run, facts: dict[str, Any]) -> None:
    """Write record.json on rank 0: provenance, layout, versions, and the facts that the caller adds."""
    assert run.directory is not None
    if run.rank != 0:
        return
    preset = run.config.settings.get(("model", "preset"))
    record = {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": sys.argv,
        "preset": preset.value if preset else None,
        **provenance(run),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "layout": run.config.parallel.layout,
        "world_size": run.mesh.world_size,
        "device": run.device,
        **facts,
    }
    write_whole(run.directory / "record.json", json.dumps(record, indent=2) + "\n")
