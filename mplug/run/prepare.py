"""Make a run from a config: instantiate the plugins, let them check the config, make the mesh. Imports no torch."""

import math
from pathlib import Path

from mplug.config.binding import RunConfig
from mplug.config.family import contained_in
from mplug.config.sources import source_of
from mplug.contracts.streams import STREAMS
from mplug.contracts.variance import Variance
from mplug.errors import UsageError, listed, suggest
from mplug.layout.mesh import Axis, Mesh, contiguous, view_sizes
from mplug.registry.asking import asking
from mplug.registry.hooks import Hooks
from mplug.run.rank_limit import layout_words, refuse_too_many_ranks
from mplug.run.run import Run


def prepare(
    config: RunConfig,
    further: dict[str, object] | None = None,
    directory: Path | None = None,
    world_size: int | None = None,
) -> Run:
    """The run of a config. Raises UsageError with the problems that the plugins and the host find in the config.

    `further` are objects with hooks, by their labels, that no config names: the host's observers, and the part of a
    command in the runs that it builds (its label is `COMMAND` and the command's name).

    The default of `world_size` is the smallest number of ranks that every view of the mesh divides. The strategy of
    `parallel.data` gets the ranks that the layout's own axes do not use; the layout in the run's config then names it.
    If that strategy states `sums_for_others`, it also takes part with one rank in a layout that divides samples but not
    the batch: it sums the gradients of their parts during backward; the host would do it after backward.
    """
    hooks = _hooks_of(config, further)
    _refuse_config(hooks, config)
    hooks.refuse_rivals()
    answers = _answered_axes(hooks, config)
    _refuse_rest_without_data(config)
    axes, degrees = _with_unique_names(answers), config.parallel.degrees
    if degrees and not axes:
        raise UsageError(
            f"{layout_words(config)}: none of the strategies {listed(degrees)} adds a mesh axis; use another one"
        )
    sizes = view_sizes(axes)
    ranks = world_size or math.lcm(*sizes.values())
    refuse_too_many_ranks(config, ranks)
    mesh = Mesh.of(axes, ranks)
    if ranks > sizes["dense"]:
        return prepare(_with_rest(config, axes, ranks), further, directory, ranks)
    rest = config.parallel.rest
    if rest is not None and rest.sums_for_others and _lacks_sums(axes):
        return prepare(config.with_sums(), further, directory, ranks)
    _refuse_uneven_batch(config, mesh)
    _refuse_uneven_sequence(config, mesh)
    entries = frozenset(hooks.call.batch_entries(config=config) or ())
    run = Run(config, hooks, mesh, device=config.trainer.device, directory=directory, entries=entries - {STREAMS})
    if STREAMS in entries:
        run.entries |= frozenset(run.processor.entries)
    _refuse_wrong_variances(run)
    _refuse_unused_base_modules(run)
    return run


def _refuse_config(hooks: Hooks, config: RunConfig) -> None:
    """Let all plugins check the config; raise UsageError with the problems of all."""
    problems = []
    for label, check in hooks.layered("configure"):
        try:
            with asking(label, "configure"):
                check(config=config)
        except UsageError as error:
            problems.append(str(error))
    problems += _refusals_of_families(config)
    if problems:
        raise UsageError("\n".join(problems))


def _refusals_of_families(config: RunConfig) -> list[str]:
    """The messages of families inside of the model, and of optimizers of groups, that refuse the config."""
    problems = []
    groups = [group.optimizer for group in config.groups if group.optimizer]
    for contained in (*(family for _, family in contained_in(config.model)), *groups):
        try:
            with asking(contained.label, "configure"):
                contained.call("configure", config=config)
        except UsageError as error:
            problems.append(str(error))
    return problems


def check_data(run: Run) -> list[str]:
    """Let the data plugin check its data; returns what the user must know about it. Imports no torch."""
    sentences: list[str] = []
    for label, check in run.hooks.layered("check_data"):
        with asking(label, "check_data"):
            try:
                answer = check(config=run.config)
            except OSError as error:  # a folder that may not be searched, a name that is too long
                raise UsageError(f"{label} cannot read '{error.filename}': {error.strerror or error}") from error
        answer = [] if answer is None else answer
        if not isinstance(answer, list | tuple) or not all(isinstance(sentence, str) for sentence in answer):
            raise UsageError(f"{label} answers 'check_data' with {answer!r}; the answer is a list of sentences or None")
        sentences += answer
    return sentences


def _refuse_wrong_variances(run: Run) -> None:
    for label, variance in run.variances.items():
        if not isinstance(variance, Variance):
            raise UsageError(
                f"the hook 'varies' of {label} returned {variance!r}; it must return a mplug.Variance or None"
            )
        for axis in variance.sums:
            if axis not in run.mesh.axes:
                axes = list(run.mesh.axes)
                raise UsageError(
                    f"the hook 'varies' of {label} names the axis '{axis}', which the mesh does not "
                    f"have{suggest(axis, axes)} (axes: {listed(axes)})"
                )


def _refuse_unused_base_modules(run: Run) -> None:
    """Raise UsageError if the config names base modules and its precision has no recipe that they could ignore."""
    trainer = run.config.trainer
    if run.precision.recipe is None and trainer.base_modules is not None:
        source = source_of(run.config.settings, ("trainer", "base_modules"))
        raise UsageError(
            f"trainer.base_modules ({source}): the precision '{trainer.precision}' has no recipe for matrix products, "
            f"so all modules compute in {run.precision.activations}; remove the setting, or name another precision"
        )


def _with_rest(config: RunConfig, axes: list[Axis], ranks: int) -> RunConfig:
    """The config, with the data-parallel strategy over the ranks that the axes of the dense view do not use."""
    sizes, parallel = view_sizes(axes), config.parallel
    if parallel.rest is not None:
        return config.with_rest(ranks // sizes["dense"], f"{ranks} ranks")
    views = " and ".join(f"{size} ranks in the view '{view}'" for view, size in sizes.items())
    data = f"the layout fixes the degree of '{parallel.data}'" if parallel.data else "parallel.data is null"
    raise UsageError(
        f"{layout_words(config)} has {views}; a run of {ranks} ranks needs {ranks // sizes['dense']} times as many "
        f"data-parallel ranks, but {data}; change the degrees in the layout"
    )


def _lacks_sums(axes: list[Axis]) -> bool:
    """Whether axes divide samples, so that their ranks sum gradients, and none of them divides the batch."""
    return not any("batch" in axis.entries for axis in axes) and any(axis.entries and axis.size > 1 for axis in axes)


def _hooks_of(config: RunConfig, further: dict[str, object] | None = None) -> Hooks:
    plugins = dict(further or {})
    for chosen in config.chosen:
        with asking(chosen.label, "__init__"):
            plugins[chosen.label] = chosen.plugin(chosen.config)
    return Hooks(plugins)


def _answered_axes(hooks: Hooks, config: RunConfig) -> dict[str, list[Axis]]:
    """The axes of all strategies, by their labels."""
    answers: dict[str, list[Axis]] = {}
    for label, mesh_axes in hooks.layered("mesh_axes"):
        with asking(label, "mesh_axes"):
            answers[label] = [*(mesh_axes(config=config) or ())]
    return answers


def _with_unique_names(answers: dict[str, list[Axis]]) -> list[Axis]:
    """The axes of all strategies; UsageError if two have the same name."""
    owners: dict[str, str] = {}
    for label, axes in answers.items():
        for axis in axes:
            if axis.name in owners:
                raise UsageError(
                    f"{owners[axis.name]} and {label} both add an axis '{axis.name}'; remove one from the layout"
                )
            owners[axis.name] = label
    return [axis for axes in answers.values() for axis in axes]


def _refuse_rest_without_data(config: RunConfig) -> None:
    """Raise UsageError if the strategy of `parallel.data` does not divide the batch."""
    rest = config.parallel.rest
    if rest is None:
        return
    trial = config.with_rest(2, "parallel.data")
    try:
        axes = _answered_axes(_hooks_of(trial), trial).get(rest.label, [])
    except UsageError:
        return  # the error is about the trial degree 2, which the user did not set
    if not any("batch" in axis.entries for axis in axes):
        source = source_of(config.settings, ("parallel", "data"))
        raise UsageError(
            f"parallel.data ({source}): {rest.label} does not divide the batch, so it is not a data-parallel strategy; "
            f"use a data-parallel strategy or null, and give {rest.entry.name} a degree in the layout"
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
                f"{name} ({source}): {size} is not a multiple of {' times '.join(factors)}; use a multiple of {least}"
            )


def _refuse_uneven_sequence(config: RunConfig, mesh: Mesh) -> None:
    """Raise UsageError if the mesh axes cannot divide the sequence, in batch entries and then inside the model."""
    dividing = [axis for axis in mesh.views["dense"] if axis.divides("sequence")]
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
