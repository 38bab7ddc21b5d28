"""From a prepared run to a model: split, placed, its slots filled, measured."""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mplug.config.binding import RunConfig
from mplug.contracts.micro_batch import OF_OBJECTIVES, SEQUENCES
from mplug.contracts.optimizer import Optimizer, Piece, ShapedState, tensors_of
from mplug.errors import UsageError, listed
from mplug.model.builders import builder_of
from mplug.model.engine import planned_pieces, refuse_incomplete_engine
from mplug.model.generator_seeds import GeneratorSeeds, drawing_plugin
from mplug.model.memory import allocate
from mplug.model.mixing import refuse_mixing
from mplug.model.model import Model
from mplug.model.pieces import make_pieces
from mplug.model.plans.adapting import adapt
from mplug.model.plans.count_passes import passes_of
from mplug.model.plans.freezing import freeze, freeze_all
from mplug.model.products.casts import copies_of
from mplug.model.products.gathered_copies import refuse_idle_copies
from mplug.model.recorder import recorder_of
from mplug.model.single_optimizer import build_optimizer
from mplug.model.sizes import within_reason
from mplug.model.slots.fill import fill_slots, select_offers
from mplug.model.slots.kernel_limits import NO_GPU
from mplug.model.slots.offers import PLAIN, Offer, Unmet, Wrap
from mplug.model.slots.recipe import choose_base_modules
from mplug.model.slots.slot_placement import add_slot_buffers
from mplug.model.slots.token_offers import token_offers
from mplug.model.stream_balancer import balancer_of
from mplug.model.unit_compiler import refuse_missing_compiler
from mplug.model.unlike_stages import ranks_of_unlike_stages
from mplug.model.updates import updates_of
from mplug.model.variance import refuse_bypassing_layout
from mplug.registry.entry_points import PREFLIGHTS
from mplug.registry.hooks import Hooks
from mplug.registry.provided import provided
from mplug.run.run import Run


def choose_device(config: RunConfig) -> str:
    """'cpu' or 'cuda': the config's choice; with 'auto', 'cuda' if torch sees a GPU."""
    device, available = config.trainer.device, torch.cuda.is_available()
    if device == "cuda" and not available:
        raise UsageError("trainer.device=cuda: torch finds no GPU on this machine; set trainer.device=auto or cpu")
    return "cuda" if device != "cpu" and available else "cpu"


def build_model(run: Run) -> Model:
    """The model on the meta device: split into stages, placed, and with its slots filled.

    Raises UsageError if the chosen plugins do not meet a need; before launch, also one of another stage.
    """
    model, unmet = _build_model(run)
    _refuse_unmet(run, unmet)
    if not run.trains:
        return model  # nothing is trained, and there is no optimizer
    updates = updates_of(run, model)
    if updates is not None:
        updates.refuse_plugins(run, model)
    _shard_states(run, model)
    refuse_incomplete_engine(run, model)
    if updates is not None:
        updates.refuse(run, model)
    refuse_idle_copies(run, model)
    refuse_bypassing_layout(run, model)
    refuse_missing_compiler(run)
    if (recorder := recorder_of(run)) is not None:
        recorder.refuse(run, model)
    return model


def _refuse_unmet(run: Run, unmet: list[Unmet]) -> None:
    """Raise UsageError if plugins do not meet needs; it says for each of them which kernels would do."""
    if lines := _missing_gpu(run, unmet):
        raise UsageError("\n".join(lines))
    different = {str(one): one for one in unmet}
    representatives = {(u.plugin, u.kind): u for u in different.values()}  # trying a kernel costs one process
    remedies = {key: _remedy(run.config, one) for key, one in representatives.items()}
    if different:
        raise UsageError("\n".join(f"{text}{remedies[u.plugin, u.kind]}" for text, u in different.items()))


def _shard_states(run: Run, model: Model) -> None:
    """Let a plugin shard the optimizer states."""
    model.sharding = run.hooks.call.shard_states(run=run, model=model)
    _refuse_states_of_frozen(run, model)
    _refuse_transient_gradients(run, model)


def _refuse_states_of_frozen(run: Run, model: Model) -> None:
    """Raise UsageError if a plugin shards the optimizer state of a frozen parameter, which has no state."""
    for name in model.sharding.of if model.sharding else ():
        if not model.placements[name].parameter.trainable:
            (label,) = run.hooks.implementers("shard_states")
            raise UsageError(
                f"{label} shards the optimizer state of '{name}', which is frozen and has none: the plugin ignores "
                f"Parameter.trainable of the placements; use a layout without it, or freeze nothing"
            )


def _refuse_transient_gradients(run: Run, model: Model) -> None:
    """Raise UsageError if every backward pass sums gradients, but one pass does not compute those of all units."""
    if model.sharding is None or not model.sharding.transient:
        return
    if model.stages.backward == "split" or len(model.own_chunks) > 1:
        (label,), (pipeline,) = run.hooks.implementers("shard_states"), run.hooks.implementers("build_pipeline")
        is_split = model.stages.backward == "split"
        reason = "weight gradients later" if is_split else "one chunk of a rank's units at a time"
        raise UsageError(
            f"{label} sums all gradients of a rank at the end of every backward pass, and the schedule "
            f"'{model.stages.schedule}' of {pipeline} computes {reason}; keep whole gradients (ZeRO stage 1), or use a "
            f"schedule with one chunk per rank and an undivided backward pass, such as 1f1b"
        )


def _missing_gpu(run: Run, unmet: Sequence[Unmet]) -> list[str]:
    """The error lines of a run on the CPU that only a GPU could serve; empty if the kernels lack something else.

    Without a GPU, no other kernel is searched for: the search takes a minute, and would hide the cause.
    """
    if run.device != "cpu":
        return []
    cause = "trainer.device=cpu" if run.config.trainer.device == "cpu" else "torch finds no GPU on this machine"
    without = {one.plugin: one for one in reversed(unmet) if NO_GPU in one.reason}
    if without:
        return [f"{one} ({cause}); leave the kernel out here" for one in without.values()]
    recipe = run.precision.recipe
    plain = [one for one in unmet if one.plugin == PLAIN and recipe is not None and recipe.need in one.site.needs]
    if recipe is not None and plain:
        return [
            f"{plain[0]}; this run is on the CPU ({cause}): use --precision bf16 here, or name a kernel that computes "
            f"the recipe '{recipe.name}' on a CPU, slowly: kernels.{plain[0].kind}=NAME"
        ]
    return []


def _remedy(config: RunConfig, unmet: Unmet) -> str:
    """The end of the error message: the kernels to use instead; empty if a plugin of another kind has the need."""
    is_kernel = unmet.plugin == PLAIN or unmet.plugin in config.kernels.plugins
    preflight = provided(PREFLIGHTS) if is_kernel else None
    return "" if preflight is None else str(preflight.kernels_that_would_do(config, unmet))


def _build_model(run: Run) -> tuple[Model, list[Unmet]]:
    """The model of a rank and its unmet needs; before launch, rank 0 adds those of stages with other blocks."""
    run.device = choose_device(run.config)
    (label,) = run.hooks.implementers("build_model")
    with torch.device("meta"), within_reason(run.config, label):
        model: Model = run.hooks.call.build_model(run=run)
        of_loader = run.entries
        adapt(run, model)
        _refuse_unused_entries(run, model, of_loader)
        _refuse_missing_entries(run, model)
    if run.trains:
        freeze(model, run.config)
        if run.config.groups and (updates := updates_of(run, model)) is not None:
            model.groups = {**updates.grouped(run, model)}
    else:
        freeze_all(model)
    model.plan = replace(model.plan, work=model.work)
    model.recipe, model.base_modules = run.precision.recipe, choose_base_modules(run, model)
    model.pipeline = run.hooks.call.build_pipeline(run=run, model=model)
    _refuse_two_steppers(run, model)
    model.place(run.mesh, None if model.pipeline is None else model.pipeline.stages)
    refuse_mixing(run, model)
    if (balancer := balancer_of(run)) is not None:
        balancer.refuse(run, model)
    model.set_passes(passes_of(model))
    elsewhere = _unmet_in_other_stages(run, model)  # before the hooks that are about this rank's stage
    model.keep_stage(run.mesh.index(run.rank, model.stages.axis))
    run.hooks.call.shard_model(run=run, model=model)
    for group in run.config.groups:
        if group.optimizer is not None:
            group.optimizer.call("shard_model", run=run, model=model)
    selection = select_offers(model, run, collect_offers(run, model))
    run.hooks.call.offers_selected(run=run, model=model, selection=selection)
    add_slot_buffers(model, run, selection.filled)
    fill_slots(model, selection)
    drawing = drawing_plugin(run, model.slots)
    model.seeds = GeneratorSeeds(model.plan, run.mesh, run.rank, run.device, drawing)
    return model, [*selection.unmet, *elsewhere]


def _unmet_in_other_stages(run: Run, model: Model) -> list[Unmet]:
    """By copies of the plugins: some keep the model that they were asked about last."""
    if run.rank or run.groups is not None:
        return []
    unlike = ranks_of_unlike_stages(model, run.mesh, run.entries)
    copies = [Hooks({label: copy(plugin) for label, plugin in run.hooks.plugins.items()}) for _ in unlike]
    others = [replace(run, rank=rank, hooks=hooks) for rank, hooks in zip(unlike, copies, strict=True)]
    return [unmet for other in others for unmet in _build_model(other)[1]]


def _refuse_two_steppers(run: Run, model: Model) -> None:
    """Raise UsageError if a plugin replaces the stepper of a model that another has divided into stages."""
    others = run.hooks.implementers("build_stepper")
    if model.pipeline is not None and others:
        (pipeline,) = run.hooks.implementers("build_pipeline")
        raise UsageError(
            f"{pipeline} runs the step of its stages ('build_pipeline'), and {listed(others)} replaces the step "
            f"('build_stepper'); use only one of them"
        )


def _refuse_unused_entries(run: Run, model: Model, of_loader: frozenset[str]) -> None:
    """Raise UsageError if no unit takes an optional entry: a model without document lengths would mix documents.

    Entries of objectives may be unused in a run that does not train.
    """
    inputs = {name for unit in model.plan.units for name in (*unit.inputs, *unit.optional)}
    unused = sorted(of_loader - inputs - (frozenset() if run.trains else OF_OBJECTIVES))
    if unused:
        (loader,), (owner,) = (run.hooks.implementers(hook) for hook in ("build_loader", "build_model"))
        if SEQUENCES in unused:
            raise UsageError(
                f"{loader} numbers the sequences of a sample for an objective, and the run has none; name one "
                f"(--objective NAME; 'mplug plugins list --kind objectives' lists those that are installed)"
            )
        raise UsageError(
            f"micro batches of {loader} have {listed(map(repr, unused))}, which no unit of {owner} takes as input; "
            f"change the settings of {loader} so that it omits them, or use another model"
        )


def _refuse_missing_entries(run: Run, model: Model) -> None:
    """Raise UsageError if a stream of the model needs entries that the loader of the run does not supply.

    They are those that units need, and all that the family's processor makes.
    """
    if not run.trains:
        return
    inputs = {name for unit in model.plan.units for name in unit.inputs}
    processor = run.hooks.call.build_processor(config=run.config)
    made = () if processor is None else processor.entries
    for axis, stream in model.plan.streams.items():
        needed = dict.fromkeys((*made, *sorted(inputs & model.plan.entries_of(axis))))
        if missing := [name for name in needed if name not in run.entries]:
            (loader,), (owner,) = (run.hooks.implementers(hook) for hook in ("build_loader", "build_model"))
            raise UsageError(
                f"micro batches of {loader} have no {listed(map(repr, missing))}, which {owner} needs for its {axis}; "
                f"{stream.remedy}"
            )


def states_without_memory(run: Run, model: Model) -> tuple[Optimizer, list[Piece]]:
    """The optimizer and its pieces, of tensors without memory."""
    pieces, masters = [], run.precision.master_dtype
    with FakeTensorMode():
        for name, parameter in model.parameters().items():
            if parameter.requires_grad:
                placement = model.placements[name]
                shape = (2, *placement.local_shape(run.rank))
                master, gradient = torch.zeros(shape, dtype=masters, device=run.device).unbind()
                pieces.append(Piece(name, master, gradient, None, placement.parameter, placement))
        optimizer = build_optimizer(run, model, pieces)
        refuse_unsavable(run, model, optimizer, pieces)
    return optimizer, pieces


def refuse_unsavable(run: Run, model: Model, optimizer: Optimizer, pieces: list[Piece]) -> None:
    """Raise UsageError if the optimizer keeps a state that no checkpoint can hold."""
    for piece in pieces:
        label = builder_of(run, model, piece.name)
        for name, held in optimizer.state(piece).items():
            state = f"{label} keeps a state '{name}' of '{piece.name}'"
            if name == "weight":
                raise UsageError(f"{state}: in a checkpoint, this name is the weight's; rename the state")
            if not isinstance(held, ShapedState) and held.shape not in ((), piece.master.shape):
                raise UsageError(
                    f"{state} of shape {tuple(held.shape)}, and the weight has shape {tuple(piece.master.shape)}: "
                    f"a state of another shape must be a mplug.ShapedState; use another optimizer"
                )


def gradient_dtype(run: Run, model: Model) -> torch.dtype:
    """The dtype of the gradients that sinks hold.

    It is the precision's `gradients` if every gradient is one product that is never added to, and the optimizer accepts
    that format; otherwise it is the dtype of the masters.
    """
    trainer, precision = run.config.trainer, run.precision
    _, shards = run.mesh.batch_shard(run.rank)
    is_summed = (
        run.micro_batch_size * shards < trainer.global_batch_size
        or any(axis.entries and axis.size > 1 for axis in run.mesh.axes.values())
        or bool(model.plan.tied)
    )
    if trainer.gradients != "auto" or precision.gradients == precision.masters or is_summed:
        return precision.master_dtype
    accepts = states_without_memory(run, model)[0].low_precision_gradients
    return precision.gradient_dtype if accepts else precision.master_dtype


def collect_offers(run: Run, model: Model) -> list[Offer | Wrap]:
    """The offers of all plugins, with their labels, in the order of the hooks; then the host's own offers."""
    by_plugin = run.hooks.each("offer", run=run, model=model)
    offers = [replace(offer, plugin=label) for label, offers in by_plugin for offer in offers]
    balancer = balancer_of(run)
    balanced = balancer.offers(run, model) if balancer is not None else ()
    return [*offers, *token_offers(run, model), *balanced]


def unmet_reasons(run: Run) -> list[str]:
    """Why the chosen kernels cannot serve this run's model; empty if they can."""
    return [str(unmet) for unmet in _build_model(run)[1]]


def allocate_parts(run: Run, model: Model) -> None:
    """Allocate the parameters and buffers of this rank in the run's precision."""
    precision = run.precision
    where, seed = torch.device(run.device), run.config.trainer.seed
    allocate(model, run.rank, where, precision.weight_dtype, seed, precision.master_dtype)


IN_CPU_MEMORY = "optimizer state in CPU memory"
"""What `measure_bytes` counts that is not on the run's device."""


def measure_bytes(run: Run, model: Model) -> dict[str, int]:
    """Bytes that a rank will hold: the storages of a real build, made of tensors without memory."""
    gradients = gradient_dtype(run, model)
    with FakeTensorMode():
        allocate_parts(run, model)
        model.listen(gradients)
        pieces = make_pieces(model) if model.engine is None else planned_pieces(run, model)
        optimizer = build_optimizer(run, model, pieces)
        states = [tensor for piece in pieces for tensor in tensors_of(optimizer.state(piece)).values()]
        kinds: dict[str, list[torch.Tensor]] = {
            "weights": [parameter for parameter in model.parameters().values() if parameter.requires_grad],
            "frozen weights": list(model.frozen.values()),
            "masters": [piece.master for piece in pieces if piece.weight is not None],
            "gradients": [*(sink.buffer for sink in model.sinks.values()), *(piece.gradient for piece in pieces)],
            "optimizer state": states,
            "copies of weights": copies_of(model),
            "buffers of suppliers": [buffer for one in model.slot_buffers for buffer in one.tensors().values()],
        }
        measured = {kind: _nbytes(tensors) for kind, tensors in kinds.items() if tensors}
        if (updates := updates_of(run, model)) is not None:
            measured |= updates.num_bytes(optimizer)
            measured = {kind: size for kind, size in measured.items() if size}
    of_engine = {} if model.engine is None else model.engine.num_bytes
    stated = {kind.partition(",")[0] for kind in of_engine}
    return {**{kind: size for kind, size in measured.items() if kind not in stated}, **of_engine}


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())
