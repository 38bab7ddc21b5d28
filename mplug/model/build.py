"""From a prepared run to a model: split, placed, its slots filled, measured."""

from contextlib import nullcontext
from copy import copy
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mplug.config.binding import RunConfig
from mplug.contracts.optimizer import Optimizer, Piece, ShapedState
from mplug.errors import UsageError
from mplug.model.invariance import invariance_of
from mplug.model.memory import allocate
from mplug.model.model import Model
from mplug.model.plans.adaptations import adaptations
from mplug.model.products import add_slot_buffers, choose_base_modules, refuse_idle_copies
from mplug.model.recorder import recorder_of
from mplug.model.seeds import seeds_of
from mplug.model.sharding import shardings
from mplug.model.single_optimizer import build_optimizer, builder_of
from mplug.model.slots.fill import fill_slots, select_offers
from mplug.model.slots.offers import Offer, Unmet, Wrap
from mplug.model.slots.token_offers import token_offers
from mplug.model.stream_balancer import balancer_of
from mplug.model.unit_compiler import refuse_missing_compiler
from mplug.model.updates import updates_of
from mplug.registry.hooks import Hooks
from mplug.registry.provided import needed, provided
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
    model.sharding = run.hooks.call.shard_states(run=run, model=model)
    if model.sharding is not None:
        shardings().refuse(run, model)
    if updates is not None:
        updates.refuse(run, model)
    refuse_idle_copies(run, model)
    if (invariance := invariance_of(run)) is not None:
        invariance.refuse_layout(run, model)
    refuse_missing_compiler(run)
    if (recorder := recorder_of(run)) is not None:
        recorder.refuse(run, model)
    return model


def _refuse_unmet(run: Run, unmet: list[Unmet]) -> None:
    """Raise UsageError if plugins do not meet needs; it says for each of them which kernels would do."""
    if unmet:
        preflight = provided("preflights")
        lines = dict.fromkeys(map(str, unmet)) if preflight is None else preflight.about_unmet(run, unmet)
        raise UsageError("\n".join(lines))


def _build_model(run: Run) -> tuple[Model, list[Unmet]]:
    """The model of a rank and its unmet needs; before launch, rank 0 adds those of stages with other blocks."""
    run.device = choose_device(run.config)
    (label,) = run.hooks.implementers("build_model")
    preflight = provided("preflights")
    with torch.device("meta"), nullcontext() if preflight is None else preflight.within_reason(run.config, label):
        model: Model = run.hooks.call.build_model(run=run)
        of_loader = run.entries
        if adapting := run.hooks.implementers("adapt_model"):
            adaptations(adapting[0]).adapt(run, model)
        if of_loader or model.plan.streams:
            needed("faults", "optional entries of micro batches", "mplug-faults").refuse_entries(run, model, of_loader)
    if run.trains:
        if run.config.frozen or not any(one.trainable for one in model.plan.match(model.parameters()).values()):
            adaptations("model.frozen").freeze(model, run.config)
        if run.config.groups and (updates := updates_of(run, model)) is not None:
            model.groups = {**updates.grouped(run, model)}
    else:
        model.plan = replace(model.plan, frozen=("*",))  # no strategy then keeps anything for gradients
    model.plan = replace(model.plan, work=model.work)
    model.recipe, model.base_modules = run.precision.recipe, choose_base_modules(run, model)
    model.pipeline = run.hooks.call.build_pipeline(run=run, model=model)
    model.place(run.mesh, None if model.pipeline is None else model.pipeline.stages)
    if (invariance := invariance_of(run)) is not None:
        model.mixing = invariance.mixing(run, model)
    if (balancer := balancer_of(run)) is not None:
        balancer.refuse(run, model)
    model.set_passes({} if preflight is None else preflight.passes(model))
    elsewhere = _unmet_in_other_stages(run, model, of_loader)  # before the hooks about this rank's stage
    model.keep_stage(run.mesh.index(run.rank, model.stages.axis))
    run.hooks.call.shard_model(run=run, model=model)
    for group in run.config.groups:
        if group.optimizer is not None:
            group.optimizer.call("shard_model", run=run, model=model)
    selection = select_offers(model, run, collect_offers(run, model))
    run.hooks.call.offers_selected(run=run, model=model, selection=selection)
    add_slot_buffers(model, run, selection.filled)
    fill_slots(model, selection)
    model.seeds = seeds_of(run, model)
    return model, [*selection.unmet, *elsewhere]


def _unmet_in_other_stages(run: Run, model: Model, entries: frozenset[str]) -> list[Unmet]:
    """By copies of the plugins: some keep the model that they were asked about last."""
    invariance = invariance_of(run)
    if run.rank or run.groups is not None or invariance is None:
        return []
    unlike = invariance.ranks_of_unlike_stages(model, run.mesh, run.entries)
    copies = [Hooks({label: copy(plugin) for label, plugin in run.hooks.plugins.items()}) for _ in unlike]
    pairs = zip(unlike, copies, strict=True)  # their hooks add the entries of this run's hooks again
    others = [replace(run, rank=rank, hooks=hooks, entries=entries) for rank, hooks in pairs]
    return [unmet for other in others for unmet in _build_model(other)[1]]


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
