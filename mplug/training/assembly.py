"""From a prepared run to the objects that train: every build hook, in order."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import cast

from mplug.config.sources import source_of
from mplug.contracts.loader import Loader
from mplug.contracts.optimizer import Optimizer, Piece
from mplug.contracts.stepper import Stepper
from mplug.errors import PluginError, UsageError
from mplug.model.build import allocate_parts, build_model, gradient_dtype, refuse_unsavable
from mplug.model.invariance import Summing, invariance_of, refuse_other_stages
from mplug.model.memory import initialize
from mplug.model.model import Model
from mplug.model.pieces import Held, held_values, make_pieces, write_weights
from mplug.model.products import keep_casts
from mplug.model.recorder import recorder_of
from mplug.model.sharding import shardings
from mplug.model.single_optimizer import build_optimizer
from mplug.model.slots.fill import wrap_units
from mplug.model.stream_balancer import balancer_of
from mplug.model.unit_compiler import compile_units
from mplug.model.updates import updates_of
from mplug.registry.provided import provided
from mplug.run.run import Run
from mplug.training.batch_parts import own_part
from mplug.training.division import division, division_if_installed
from mplug.training.evaluator import Evaluator
from mplug.training.feed import Feed
from mplug.training.map_loader import MapLoader
from mplug.training.source import Source
from mplug.training.stepper import DefaultStepper
from mplug.training.steps import ScalesLosses, repeating, rerunning


@dataclass
class Parts:
    """The objects of a training process."""

    model: Model
    pieces: list[Piece]
    optimizer: Optimizer
    stepper: Stepper
    train_loader: Feed
    validation_loader: Feed | None
    loss_scale: ScalesLosses | None = None

    def held(self) -> list[Held]:
        """The values of all parameters of this rank, trained or not: initialisation and checkpoints use them."""
        return held_values(self.model, self.pieces)

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters; it does not depend on the layout."""
        return sum(placement.numel for placement in self.model.placements.values())

    @property
    def num_frozen(self) -> int:
        """Number of elements of the frozen parameters."""
        return sum(one.numel for one in self.model.placements.values() if not one.parameter.trainable)


def build(run: Run) -> Parts:
    """Build everything that a training process needs; cheap checks come first."""
    trainer, model = run.config.trainer, build_model(run)
    refuse_other_stages(run, model)
    if (recorder := recorder_of(run)) is not None:
        recorder.begin()
    train_loader = feed(run, model, "train")
    is_evaluated = trainer.eval_every and provided("validations") is not None
    validation_loader = feed(run, model, "validation") if is_evaluated else None
    compile_units(run, model)
    wrap_units(model)
    _allocate(run, model)
    pieces = _initialized_pieces(run, model)
    optimizer = _optimizer(run, model, pieces)
    default = DefaultStepper(run, model, pieces, optimizer)
    stepper = repeating(run, model, _stepper(run, model, default))
    if (updates := updates_of(run, model)) is not None:
        stepper = updates.stepper(run, model, pieces, optimizer, stepper)
    stepper = rerunning(run, model, stepper)
    run.hooks.observe("training_built", run=run, model=model, pieces=pieces, optimizer=optimizer)
    return Parts(model, pieces, optimizer, stepper, train_loader, validation_loader, default.loss_scale)


def allocate_forward(run: Run, model: Model) -> None:
    """Give a model of a run that does not train its memory, and let strategies wrap its units. Collective.

    The units are compiled as the config says. There are neither gradients nor an optimizer. Weights are loaded
    afterwards (`load_for_inference`, `load_public_for_inference`).
    """
    refuse_other_stages(run, model)
    compile_units(run, model)
    wrap_units(model)
    allocate_parts(run, model)
    model.listen()
    _wrap(run, model)
    keep_casts(model)


def forward_stepper(run: Run, model: Model) -> Stepper:
    """What evaluates the model of a run that does not train; only its method `evaluate` may be called. Collective."""
    return _around(run, model, Evaluator(run, model))


def _allocate(run: Run, model: Model) -> None:
    """Allocate this rank's parameters and sinks, and let strategies and kernels take part in their use."""
    gradients = gradient_dtype(run, model)
    allocate_parts(run, model)
    model.listen(gradients)
    _wrap(run, model)
    keep_casts(model)


def _initialized_pieces(run: Run, model: Model) -> list[Piece]:
    """The pieces that this rank updates. All values that the rank holds are initialised, and its weights written."""
    pieces = make_pieces(model)
    if model.engine is not None:
        shardings().refuse_missing_pieces(model, pieces, run.rank)
    held = held_values(model, pieces)
    placements = {one.name: one.placement for one in held}
    initialize({one.name: one.values for one in held}, placements, run.rank, run.config.trainer.seed)
    write_weights(pieces)
    model.weights_written()
    return pieces


def _optimizer(run: Run, model: Model, pieces: list[Piece]) -> Optimizer:
    with nullcontext() if model.engine is None else model.engine.making_states():
        optimizer = build_optimizer(run, model, pieces, run.groups)
    refuse_unsavable(run, model, optimizer, pieces)
    return optimizer


def _stepper(run: Run, model: Model, default: DefaultStepper) -> Stepper:
    """The stepper that replays graphs, that of the pipeline, that of another strategy, or the default one."""
    if (recorder := recorder_of(run)) is not None:
        recorded: Stepper = recorder.stepper(default)
        return recorded
    return _around(run, model, default)


def _around(run: Run, model: Model, default: Evaluator) -> Stepper:
    if model.pipeline is not None:
        return model.pipeline.stepper(default)
    stepper: Stepper | None = run.hooks.call.build_stepper(run=run, model=model, default=default)
    return stepper or cast("Stepper", default)


def _wrap(run: Run, model: Model) -> None:
    """Call `wrap_model` of every plugin; UsageError if their sums of gradients contradict one another."""
    summing: list[Summing] = []
    for label, wrap in run.hooks.layered("wrap_model"):
        known = set(model.sinks.reduced_over)
        wrap(run=run, model=model)
        if named := model.sinks.reduced_over - known:
            summing.append(Summing(label, frozenset(named)))
    if model.engine is not None:
        shardings().refuse_other_sums(run, model, dict.fromkeys(one.label for one in summing))
    if (invariance := invariance_of(run)) is not None:
        invariance.refuse_summers(run, model, summing)


def feed(run: Run, model: Model, split: str, loader: Loader | None = None) -> Feed:
    """This rank's parts of the micro batches of a split; of those of `loader`, if the run's data do not supply them."""
    cut = partial(own_part, plan=model.plan, mesh=run.mesh, rank=run.rank)
    balancer = balancer_of(run)
    mover = None if balancer is None else balancer.mover(run, model)
    if loader is None:
        own = partial(_weighed_loader, run, model, split)
        loader = division().shared_loader(run, own) if run.config.parallel.read_once else own()
    else:
        _refuse_small_vocabulary(run, loader)
    taken = {name for unit in model.own_units for name in (*unit.inputs, *unit.optional)}
    idle = model.plan.stream_entries - taken  # a stage without the units of a stream does not need its rows
    found = division_if_installed()
    shares = None if found is None else found.of_documents(run.mesh)
    return Feed(loader, run.device, Source.of(run, split, model.plan), cut, mover, idle, shares)


def _weighed_loader(run: Run, model: Model, split: str) -> Loader:
    loader = build_loader(run, split)
    if split == "train" and run.trains:  # an evaluation leaves the last samples of the global order out
        _weigh(run, model, loader)
    return loader


def _weigh(run: Run, model: Model, loader: Loader) -> None:
    """Let a loader that states the lengths of documents measure the work of ranks, and balance it if the config asks.

    UsageError if the config asks, and neither the loader nor a stream of the model has anything to balance.
    """
    balances, (_, shards) = run.config.parallel.balance, run.mesh.batch_shard(run.rank)
    if isinstance(loader, MapLoader) and loader.documents is not None:
        if shards > 1 and (balances or division_if_installed() is not None):
            loader.weigh(lambda lengths: sum(model.flops.of(one, one * one) for one in lengths), balances)
    elif balances and not model.plan.streams:
        (label,) = run.hooks.implementers("build_loader")
        source = source_of(run.config.settings, ("parallel", "balance"))
        raise UsageError(
            f"parallel.balance ({source}): {label} does not state the lengths of the documents of its samples, and the "
            f"model has no stream beside the tokens, so there is nothing to balance; set parallel.balance=false"
        )


def build_loader(run: Run, split: str) -> Loader:
    """The loader of a split; UsageError if its vocabulary is larger than the model's."""
    loader = run.hooks.call.build_loader(run=run, split=split)
    if not isinstance(loader, Loader):
        (label,) = run.hooks.implementers("build_loader")
        returned = type(loader).__name__
        raise PluginError(f"build_loader of {label} returns '{returned}', which is not derived from mplug.Loader")
    _refuse_small_vocabulary(run, loader)
    return loader


def _refuse_small_vocabulary(run: Run, loader: Loader) -> None:
    vocab_size = getattr(run.config.model, "vocab_size", None)
    if vocab_size is not None and loader.vocab_size > vocab_size:
        raise UsageError(
            f"model.vocab_size={vocab_size} is too small: the data has tokens up to {loader.vocab_size - 1}; "
            f"set model.vocab_size={loader.vocab_size} or more"
        )
