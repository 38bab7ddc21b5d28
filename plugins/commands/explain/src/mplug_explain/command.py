"""mplug explain."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mplug import DOCUMENTS, DocumentMap, UsageError, counted, write_whole
from mplug.commands import (
    Registry,
    UserPath,
    config_options,
    human_bytes,
    modules_around,
    resolved,
    role_of,
    table,
)
from mplug_explain.parameters import by, gathered, grouped, is_sharded, placements, shards
from mplug_explain.updates import updates

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mplug import Axis, Model, Placement, Run
    from mplug.commands import Filled


@click.command()
@config_options
@click.option("--rank", default=0, show_default=True, help="Show the parameters and bytes of this rank.")
@click.option("--schedule", is_flag=True, help="Show only the pipeline schedule: a chart, and figures of each rank.")
@click.option("--svg", type=UserPath(dir_okay=False), help="With --schedule: also write the chart to this file.")
@click.option(
    "--longest",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GIB",
    help="Show only the longest samples whose step fits into this memory of a GPU, by the estimate.",
)
def command(rank: int, schedule: bool, svg: "Path | None", longest: float | None, **options: Any) -> None:
    """Show the parts of a run without starting it. No memory is allocated, and no data is read.

    Prints the mesh, the number formats, the units, the supplier of each slot and the buffers that it keeps, the modules
    that mix tokens outside of slots, the placement of each parameter, what ranks gather for each pass, the optimizer
    with its schedule and average, the frozen parameters, whether a CUDA graph can replay a step, the FLOPs of a step,
    whether the model can be exported as a published checkpoint, or its adapters alone, the bytes that a rank holds, and
    everything in this run that depends on the layout. A module that does not declare what it mixes is listed as "not
    known".
    """
    from mplug.commands import build_model, prepare  # they import torch and pydantic

    if longest is not None:
        from mplug_explain.longest import longest as longest_samples  # only this option needs it

        click.echo(longest_samples(options, longest))
        return
    run = prepare(resolved(options))
    if not 0 <= rank < run.mesh.world_size:
        raise UsageError(f"--rank {rank} does not exist in this layout; its ranks are 0 to {run.mesh.world_size - 1}")
    if svg is not None and not schedule:
        raise UsageError("--svg writes the chart of --schedule; add --schedule")
    if svg is not None and not svg.parent.is_dir():
        raise UsageError(f"--svg: there is no folder '{svg.parent}' for '{svg.name}'; create it, or use another one")
    run.rank = rank
    model = build_model(run)
    if schedule:
        _schedule(run, model, svg)
        return
    for title, text in (
        ("Mesh", _mesh(run)),
        ("Plugins", _plugins(run)),
        ("Precision", _precision(run, model)),
        ("Units", _units(run, model)),
        ("Slots", _slots(run, model)),
        *([("Choice among kernels.default", choice)] if (choice := _choice(run, model)) else []),
        *([("Buffers of suppliers", _slot_buffers(model, rank))] if model.slot_buffers else []),
        *([("Adapters alone", _adapters(model))] if model.adapters is not None else []),
        ("Mixed outside of slots", _mixing(model)),
        (f"Parameters of rank {rank}", placements(run, model, rank)),
        *([("Gathered for each pass", of_passes)] if (of_passes := gathered(run, model)) else []),
        *([(f"Sharded over ranks, with the part of rank {rank}", shards(model))] if is_sharded(model) else []),
        ("Updates", updates(run)),
        *([(f"Sent by rank {rank} in some steps", sent)] if (sent := _sent(run, model)) else []),
        ("A step", _step(run, model)),
        *([("Published form", published)] if (published := _published(run)) else []),
        (f"Bytes of rank {rank}", _bytes(run, model)),
        ("Depends on the layout", _variance(run, model)),
    ):
        click.echo(f"{title}\n" + "\n".join(f"  {line}" for line in text.splitlines()) + "\n")


def _published(run: "Run") -> str:
    """What an export writes in each installed format, or why it refuses this model; empty if none has a form for it."""
    from mplug_pretrained import format_named  # imports pydantic

    lines = list[str]()
    for name in Registry().names("formats"):
        command = f"'mplug checkpoint export --to {name}'"
        try:
            form = format_named(name).ask("form_of", run.config)
            lines += [] if form is None else [f"{command} writes {form}"]
        except UsageError as reason:
            lines.append(f"{command} refuses this run: {reason}")
    return "\n".join(lines)


def _schedule(run: "Run", model: "Model", svg: "Path | None") -> None:
    """Print the pipeline schedule of the run's largest step; with `svg`, write its picture."""
    from mplug_explain.chart import picture, report  # only this option needs them

    number = max(run.micro_batch_counts())
    click.echo(report(run, model, number))
    if svg is not None:
        write_whole(svg, picture(model, number))
        click.echo(f"\nthe chart is in {svg}")


def _mesh(run: "Run") -> str:
    if run.mesh.world_size == 1:
        return "one process"
    own = {name: run.mesh.index(run.rank, name) for name in run.mesh.axes}
    rows = [
        (view, axis.name, axis.size, own[axis.name], _divides(axis))
        for view, axes in run.mesh.views.items()
        for axis in axes
    ]
    header = ("VIEW", "AXIS", "SIZE", f"RANK {run.rank} IS AT", "DIVIDES")
    layout, ranks = run.config.parallel.layout, run.mesh.world_size
    return f"{layout}: {ranks} ranks; the axis listed first varies slowest\n{table(header, rows)}"


def _divides(axis: "Axis") -> str:
    """The named axes of parameters, of batch entries and of activations that an axis divides."""
    kinds = (("parameters", axis.splits), ("batch entries", axis.entries), ("activations", axis.activations))
    return "; ".join(f"{', '.join(names)} of {kind}" for kind, names in kinds if names)


def _plugins(run: "Run") -> str:
    rows = [(entry.label, entry.origin) for entry in run.config.entries]
    return table(("PLUGIN", "FROM"), rows)


def _precision(run: "Run", model: "Model") -> str:
    """The formats of the run and, if the precision has a recipe, how each product computes."""
    precision = run.precision
    formats = (precision.weights, precision.activations, precision.masters, precision.gradients, precision.loss_scaling)
    text = table(("WEIGHTS", "ACTIVATIONS", "MASTERS", "SINGLE GRADIENTS", "LOSS SCALING"), [formats])
    if precision.recipe is None:
        return text
    options = ", ".join(f"{name}={value}" for name, value in precision.recipe.options.items())
    head = (
        f"products by the recipe '{precision.recipe.name}'{f' ({options})' if options else ''}, except in base modules"
    )
    groups = Counter[tuple[str, ...]]()
    for filled in model.slots:
        site = filled.site
        if site.declared.multiplies:
            by_recipe = precision.recipe.need in site.needs
            key = (site.role, site.slot, f"recipe '{precision.recipe.name}'" if by_recipe else precision.activations)
            groups[key] += 1
    rows = [(key[0], n, *key[1:]) for key, n in groups.items()]
    base = f"base modules: {', '.join(model.base_modules) or 'none'}"
    return f"{text}\n\n{head}\n{base}\n{table(('MODULE', 'COUNT', 'PRODUCT', 'COMPUTES IN'), rows)}"


def _units(run: "Run", model: "Model") -> str:
    rows = []
    frozen = any(not placement.parameter.trainable for placement in model.placements.values())
    around = {name: set(modules_around(name)) for name in model.placements}
    for chunk, names in enumerate(model.stages.units):
        for units in grouped(list(names)).values():
            unit, members = next(unit for unit in model.plan.units if unit.name == units[0]), set(units)
            own = [placement for name, placement in model.placements.items() if not members.isdisjoint(around[name])]
            label = units[0] if len(units) == 1 else f"{units[0]} to {units[-1].rpartition('.')[2]}"
            inputs = (*unit.inputs, *(name for name in unit.optional if name in run.entries))
            counts = (f"{_elements(own):,}", f"{_frozen_elements(own):,}")[: 1 + frozen]
            stage = model.stages.rank_of(chunk)
            rows.append((stage, chunk, label, len(members), ", ".join(inputs), ", ".join(unit.outputs), *counts))
    header = ("STAGE", "CHUNK", "UNITS", "COUNT", "INPUTS", "OUTPUTS", "PARAMETERS", "FROZEN")[: 7 + frozen]
    if len(model.own_chunks) == 1:
        return table((header[0], *header[2:]), [(row[0], *row[2:]) for row in rows])
    return table(header, rows)


def _elements(placements: "Iterable[Placement]") -> int:
    return sum(placement.numel for placement in placements)


def _frozen_elements(placements: "Iterable[Placement]") -> int:
    return _elements(placement for placement in placements if not placement.parameter.trainable)


def _step(run: "Run", model: "Model") -> str:
    """The number of parameters and of frozen ones, and the FLOPs of a step of the whole run."""
    trainer, passes = run.config.trainer, model.passes
    assert passes is not None
    everything = model.placements.values()
    all_elements, frozen = _elements(everything), _frozen_elements(everything)
    samples, length = trainer.global_batch_size, trainer.seq_length
    rows = [
        (label, f"{flops.of(samples * length, samples * length**2):,}")
        for label, flops in (
            ("forward", passes.forward),
            ("gradients of activations", passes.activations),
            ("gradients of weights", passes.weights),
            ("all", passes.flops),
        )
    ]
    rows += _of_streams(model, samples)
    trained = f"{all_elements:,} parameters, {f'{frozen:,} of them frozen' if frozen else 'all of them trained'}"
    unstated = passes.unstated.of(samples * length, samples * length**2) if frozen else 0
    note = (
        f"\n{unstated:,} FLOPs count as if all their passes were computed: no module states which parameters they "
        f"belong to (plan_work)"
    )
    documents = _of_documents(run, model)
    return (
        f"{trained}\n{_replay(run, model)}\n{table(('COMPUTES', 'FLOPS'), rows)}{note if unstated else ''}{documents}"
    )


def _of_documents(run: "Run", model: "Model") -> str:
    """From which length on a document of a packed sample has most of its work in attention; what balance divides."""
    flops = model.flops
    if DOCUMENTS not in run.entries or not flops.per_squared_length:
        return ""
    equal = flops.per_token // flops.per_squared_length
    balanced = "; parallel.balance divides the samples of a step over ranks and micro batches by their FLOPs"
    _, shards = run.mesh.batch_shard(run.rank)
    maps = [(axis, axis.entries.get("sequence")) for axis in run.mesh.views["dense"] if axis.size > 1]
    divided = "".join(f"; {axis.name}: {cut.note}" for axis, cut in maps if isinstance(cut, DocumentMap))
    return (
        f"\ndocuments of more than {equal:,} tokens have most of their FLOPs in attention"
        f"{balanced if run.config.parallel.balance and shards > 1 else ''}{divided}"
    )


def _of_streams(model: "Model", samples: int) -> list[tuple[str, str]]:
    """The FLOPs of all passes over the rows of each stream, by the number of rows that its plan estimates."""
    found = []
    for axis, stream in model.plan.streams.items():
        passes = [model.stream_passes[name].flops for name in stream.lengths if name in model.stream_passes]
        total = sum(flops.of(samples * stream.rows, samples * stream.squares) for flops in passes)
        found.append((f"all of {samples * stream.rows:,} {axis} (an estimate)", f"{total:,}"))
    return found


def _replay(run: "Run", model: "Model") -> str:
    """Whether a CUDA graph replays the step, and, if the setting is off, whether one could."""
    from mplug_graphs import step_obstacles  # imports torch

    if run.config.trainer.graphs:  # otherwise the run is refused
        return "replayed as one CUDA graph for each shape of a step, after a few eager steps"
    reasons = ", and ".join(step_obstacles(run, model))
    return f"not replayed as a CUDA graph: {reasons or 'trainer.graphs=false'}"


def _slots(run: "Run", model: "Model") -> str:
    groups = Counter[tuple[str, ...]]()
    for filled in (*model.slots, *model.unit_wraps):
        wraps = ", ".join(wrap.label for wrap in filled.wraps) or "-"
        key = (filled.site.role, filled.site.slot, filled.supplier_label(run), wraps)
        groups[key] += 1
    return table(("SITE", "COUNT", "SLOT", "SUPPLIER", "WRAPS"), [(key[0], n, *key[1:]) for key, n in groups.items()])


def _choice(run: "Run", model: "Model") -> str:
    """A table of the default kernels that competed for each role of sites: why one fills it, and the others do not."""
    rows = dict[tuple[str, ...], None]()
    for filled in model.slots:
        for plugin in run.config.kernels.rivals if filled.rivals else ():
            why = _why(run, filled, plugin)
            rows[filled.site.role, filled.site.slot, plugin, why] = None
    return table(("SITE", "SLOT", "KERNEL", "CHOICE"), [*rows]) if rows else ""


def _why(run: "Run", filled: "Filled", plugin: str) -> str:
    """Why a default kernel fills a site, or does not."""
    from mplug_estimates import UNMEASURED, reason_against  # only this table needs them

    answers = [(offer, answer) for offer, answer in filled.rivals if offer.plugin == plugin]
    able = max((offer for offer, answer in answers if answer is True), key=lambda offer: offer.rate, default=None)
    if able is None:
        return reason_against(filled, plugin) or UNMEASURED
    if filled.supplier == plugin:
        if {offer.plugin for offer, answer in filled.rivals if answer is True} == {plugin}:
            return "chosen: the only one that serves it"
        return f"chosen: {able.rate:g} TFLOP/s"
    if not any(offer is filled.offer for offer, _ in filled.rivals):
        return f"gives way to {filled.supplier}"
    if run.config.trainer.graphs and able.captures is not True:
        return f"cannot be in a graph: it {able.captures or 'does not state that it can'}"
    return f"slower: {able.rate:g} TFLOP/s"


def _slot_buffers(model: "Model", rank: int) -> str:
    """A table of the buffers that suppliers keep: states, and statistics with the mesh axes that reduce them."""
    groups = Counter[tuple[str, ...]]()
    for one in model.slot_buffers:
        for name, buffer in one.declared.items():
            placement = model.buffer_placements[one.full_name(name)]
            kind = f"{buffer.reduction} over {', '.join(buffer.over)}" if buffer.over else "state"
            shapes = by(placement.shape) or "scalar", by(placement.local_shape(rank)) or "scalar"
            axes = ", ".join(placement.partial_axes) or "-"
            key = (one.site.role, one.site.slot, one.offer.plugin, name, *shapes, kind, axes)
            groups[key] += 1
    header = ("SITE", "COUNT", "SLOT", "SUPPLIER", "BUFFER", "SHAPE", "LOCAL", "KEEPS", "REDUCED OVER")
    return table(header, [(key[0], n, *key[1:]) for key, n in groups.items()])


def _mixing(model: "Model") -> str:
    """A table of the modules that mix tokens, or do not declare it, with the axes that they mix."""
    groups = Counter[tuple[str, ...]]()
    for module in model.mixing:
        if module.axes is None or module.axes:
            mixed = "not known" if module.axes is None else ", ".join(sorted(module.axes))
            key = (role_of(module.name), module.kind, mixed)
            groups[key] += 1
    if not groups:
        return "nothing: every module computes each position of each sample independently"
    return table(("MODULE", "COUNT", "CLASS", "MIXES"), [(key[0], n, *key[1:]) for key, n in groups.items()])


def _sent(run: "Run", model: "Model") -> str:
    """A table of what a rank sends in some steps only."""
    rows = [
        (label, one.what, human_bytes(one.num_bytes), f"{one.every} steps", human_bytes(one.num_bytes // one.every))
        for label, sent in run.hooks.each("sends", run=run, model=model)
        for one in sent
    ]
    return table(("BY", "WHAT", "BYTES", "EVERY", "A STEP"), rows) if rows else ""


def _bytes(run: "Run", model: "Model") -> str:
    """A table of what the rank holds between steps, which is exact, and of the activations, which are estimated."""
    from mplug_estimates import (
        estimate_activations,  # imports torch
        measure_bytes,  # imports torch
    )

    activations = estimate_activations(run, model)[run.mesh.index(run.rank, model.stages.axis)]
    measured = measure_bytes(run, model)
    rows = [(label, human_bytes(count), f"{count:,}") for label, count in measured.items()]
    estimated = [(label, f"about {human_bytes(count)}", "-") for label, count in activations.parts().items()]
    return table(("WHAT", "SIZE", "BYTES"), [*rows, *estimated])


def _adapters(model: "Model") -> str:
    """Whether the adapters have a form of their own."""
    from mplug_pretrained import (
        adapter_conversion,  # imports torch
        unpublished,
    )

    assert model.adapters is not None
    command = f"'mplug checkpoint export --to {model.adapters.format}'"
    if reason := unpublished(model):
        return f"{command} refuses this run: {reason}"
    return f"{command} writes {counted(len(adapter_conversion(model).public), 'tensor')}"


def _variance(run: "Run", model: "Model") -> str:
    from mplug_invariance import layout_dependence  # imports torch

    return "\n".join(layout_dependence(run, model)) or "nothing: the same losses to rounding under any layout"
