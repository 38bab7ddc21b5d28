"""The hooks that decide what a run consists of: its settings, model, slots, optimizer, loader, stepper and states."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from mplug.registry.specification import all_plugins, at_most_one, exactly_one, or_attribute

if TYPE_CHECKING:
    from mplug.config.binding import RunConfig
    from mplug.contracts.gatherer import Gatherer
    from mplug.contracts.loader import Loader, Stateful
    from mplug.contracts.optimizer import Optimizer, Piece
    from mplug.contracts.stepper import Pipeline, Stepper
    from mplug.contracts.variance import Traffic, Variance
    from mplug.distributed.supervision import Supervisor
    from mplug.layout.mesh import Axis
    from mplug.layout.ownership import Sharding
    from mplug.layout.plan import Parameter
    from mplug.model.assembler import Assembler
    from mplug.model.model import Model
    from mplug.model.slots.offers import Offer, Wrap
    from mplug.model.slots.selection import Selection
    from mplug.precisions.precision import Precision
    from mplug.run.run import Run
    from mplug.training.healing import Copies, Healer
    from mplug.training.stepper import DefaultStepper

# Build: before any process starts, then again on every rank.


@all_plugins
def configure(config: "RunConfig") -> None:
    """Check your own section against the whole config. Called before torch is imported.

    Raise UsageError or ValueError to refuse the config. The host reports any other exception as a fault of the plugin.
    """


@exactly_one
def define_precision() -> "Precision":
    """The number formats of a run. Every plugin of the kind `precisions` implements it, and no other plugin does.

    The answer depends on the plugin's own section alone. Pure, and called before torch is imported. To refuse a config
    as a whole, implement `configure`. Every hook that takes `run` reads the answer as `run.precision`.
    """


@all_plugins
def mesh_axes(config: "RunConfig") -> "list[Axis]":
    """The axes that a parallel strategy adds to the mesh. Pure, and called before torch is imported.

    A view of the mesh may need more ranks than the strategies of the layout fill in the dense view. The host then
    adds the strategy of `parallel.data` to the layout of the config, and asks all strategies again.
    """


@all_plugins
def varies(config: "RunConfig") -> "Variance | None":
    """How this plugin makes a run of this config differ from the run of one process by more than rounding, or None.

    A strategy that returns None, or does not implement the hook, claims that losses and gradients are those of one
    process. `mplug explain` shows the reason. The suites use the tolerance. The host refuses a layout in which another
    plugin would bypass this one. Pure, and called before torch is imported.
    """


@at_most_one
def batch_entries(config: "RunConfig") -> "tuple[str, ...] | None":
    """The optional entries of the loader's micro batches: ('document_lengths',) if it packs samples.

    The host needs the answer before launch: it refuses a model that does not take these entries, and a kernel that
    cannot serve them. Called while the host prepares a run, before torch is imported.
    """


@at_most_one
def build_processor(config: "RunConfig") -> Any:
    """The `mplug_streams.Processor` of a model with streams: it makes their entries from the media of samples.

    A family with streams implements it; loaders with media use it (`run.processor`). A loader whose micro batches have
    all of the processor's entries answers `batch_entries` with `mplug.STREAMS`. Pure, and called before torch is
    imported.
    """


@at_most_one
def check_data(config: "RunConfig") -> "Sequence[str] | None":
    """Check the data that `build_loader` will read. Return sentences that the user must know ("... is repeated").

    Only `mplug train` calls it, on every process that a user or a launcher has started: before it announces the run,
    creates its folder or starts a process, and before torch is imported. Other commands work without the data, so
    `configure` must not read it.

    Check everything that is cheap: the files exist and can be read, their headers are those of the format, each split
    that the run reads has enough for a sample (validation is read if `trainer.eval_every` is not 0). Do not read a
    whole corpus. Raise UsageError, and name the file; an OSError also refuses the data. The host prints the sentences
    below the line that announces the run. `build_loader` is also called without this check (in tests, for example), so
    it must refuse bad data as well.
    """


@at_most_one
def supervise(run: "Run") -> "Supervisor | None":
    """The object that finds processes of a training run that hang, and ends the run.

    Called in `mplug train` before it starts the processes of a run, and in each process before it joins the others. At
    that time, `run.rank` is not set. `mplug.Supervisor` says what the host lends the object, which can observe the run
    by `activity_began`, `run.activity` and `run.collectives_begun()`. Without an answer, torch ends a collective after
    30 minutes.
    """


@at_most_one
def heal(run: "Run") -> "Healer | None":
    """The object by which a run goes on in its other processes after one has died; None: such a run ends.

    Called in `mplug train` before it starts the processes of a run, and in each process when it has built its part of
    the run. `mplug.training.healing.Healer` is the contract.
    """


@all_plugins
def copies(run: "Run") -> "Copies | None":
    """The object that copies the state of a run outside its checkpoints, and continues the run from the copies.

    Called in each process when it has built its part of the run. The contract is `mplug.training.healing.Copies`.
    """


@at_most_one
def gather_checkpoints(config: "RunConfig") -> "Gatherer | None":
    """The object that joins the parts of checkpoints if each machine has a run folder of its own; None: it does not.

    Without an object, all ranks must see the folder of rank 0. With one, they need not: `run.shared_folder` says
    whether they do. Otherwise the ranks of each machine write their files and the manifest to the folder of their
    machine, and the plugin copies them, from `checkpoint_saved` on, to a place that all machines see. The files of rank
    3 begin with 'rank00003.'. Called in `mplug train` before a run continues, and in each process. Pure.
    """


@exactly_one
def build_model(run: "Run") -> "Model":
    """Build the model and its plan, on the meta device: without memory and without random numbers."""


@all_plugins
def adapt_model(run: "Run", model: "Model") -> None:
    """Add modules, parameters and buffers to the model and to its plan, and freeze parameters (LoRA).

    Called after `build_model`, on the meta device, and before anything reads the plan: slots, placements, strategies,
    checkpoints and `mplug explain` see one model. The host calls the plugins in the order of their `layer` attributes
    (integers, 0 if absent), the innermost first.

    - `model.attach(modules)` adds modules, by their names in the model, and the meaning of their parameters and buffers
      to the plan. A block computes with an added module only where its class says so, as a linear layer has an
      attribute `adapter`. Elsewhere, the plugin replaces a module (`setattr`) by one of its own, which contains the
      replaced one and passes its attributes on.
    - `model.freeze(names)` states that parameters are no longer trainable. The model then has neither their gradients
      nor their masters and optimizer states.
    - `model.merges` says how an export multiplies adapters into the weights that they adapt (`Merge`), and
      `model.adapters` is the published form of the adapters alone (`Adapters`).

    The host refuses an answer that removes, renames or reshapes a parameter of the model, or that trains a parameter
    which the model's own plan has frozen. Pure: the answer depends on the config alone, not on the rank.
    """


@at_most_one
def build_pipeline(run: "Run", model: "Model") -> "Pipeline | None":
    """Divide the units of the plan into the chunks of a pipeline, and say how ranks run them.

    Pure: the host keeps the units of this rank's chunks; names stay global. Called when the model has all its units.
    The host calls `Pipeline.stepper` in training, when everything else is built. What samples from a divided model
    calls `Pipeline.relay`; the number of samples and of positions changes from call to call.
    """


@all_plugins
def support_mixing(
    run: "Run", model: "Model", mixing: "Mapping[str, frozenset[str]]"
) -> "Mapping[str, bool | str] | None":
    """The mixing modules whose results under your mesh axes are those of one process. Pure.

    `mixing` maps names of modules to named axes: those that the module mixes, or may mix, and that the layout divides.
    The answer maps names of modules to one of two values:

    - True: the strategy supports all of these axes that its own mesh axes divide (it passes the state of a scan on, or
      the module's input is whole there).
    - A remedy: the setting with which the strategy would support them ("set parallel.NAME.option=false").

    The host refuses every module that the answer leaves out. Called before the model is split, and only if a layout
    divides what a module mixes or may mix.
    """


@all_plugins
def shard_model(run: "Run", model: "Model") -> None:
    """Change `model.placements` where the mesh axes alone do not determine the placement of a parameter.

    Two strategies must not change the placement of one parameter. A plugin that shards parameters at rest (FSDP) sets
    the placement of each of them to a `mplug_sharding.GatheredPlacement`.
    """


@all_plugins
def offer(run: "Run", model: "Model") -> "list[Offer | Wrap]":
    """Offer suppliers and wraps for slots. Pure: the host selects among all offers and applies the selection.

    Called when every parameter has its placement. The host then selects, places the buffers that the selected offers
    declare (`Offer.buffers`), and fills the slots. No memory is allocated before that.
    """


@all_plugins
def offer_undivided(run: "Run", model: "Model") -> "list[Offer | Wrap]":
    """For a strategy that divides the positions of samples: its offers for calls that have all positions. Pure.

    A model that samples uses them in the place of those of `offer`. Then ranks that divide the entries of micro batches
    in training have different samples, and ranks inside a model have the same ones.
    """


@all_plugins
def build_step_check(run: "Run", model: "Model") -> "Callable[[], bool] | None":
    """A function that says whether the passes of a step were exact; None if yours always are.

    Called when everything else is built. The host calls the function on every rank between the last backward pass of a
    step and the update; it may wait for the device and communicate. All ranks must return the same. If it returns
    False, the host discards gradients and statistics, and runs the passes of the same micro batches again. Then your
    part must compute exactly (in a slower way), and the function must return True. The metric `repeated_steps` counts
    such steps.

    Refused if an engine of another framework keeps the gradients (`Sharding.engine`).
    """


@all_plugins
def offers_selected(run: "Run", model: "Model", selection: "Selection") -> None:
    """The host has selected suppliers and wraps, and neither refused nor installed any of them yet.

    It is for what builds a model for something else than training (`mplug.commands`). `selection.filled` has the
    content of every site of this rank, `selection.offers` those of all plugins. The command may remove entries from
    `selection.unmet`, the needs that no chosen plugin serves: then the default of the slot computes these sites.
    """


@or_attribute
@all_plugins
def captures(run: "Run", model: "Model") -> "bool | str | None":
    """Whether a CUDA graph can replay this plugin's part of a step (`trainer.graphs`, or a forward pass). Pure.

    A graph records the kernels of a step once, with their arguments and addresses, and replays them in every further
    step. No Python code of the step runs then. Return True if all of this holds for the part:

    - The CPU never waits for the device, and no shape depends on values of the device.
    - Everything that changes from step to step is read from tensors, whose memory does not move: a number would be
      frozen. What outlives a step is changed in place.
    - State on the CPU is the same at the end of a step as at its beginning.
    - It draws no random numbers from torch's generators.
    - When the step ends, the current stream has waited for every other stream, and every `WeightExchange` under way has
      ended when its `wait` returns.

    Otherwise return the reason, as a clause about the plugin ("moves activations to the CPU"). A plugin whose answer is
    constant states it as a class attribute instead: `captures = True`. The host refuses
    `trainer.graphs` unless every plugin that takes part in a step returns True: the model, adapters, the strategies,
    the optimizer, and the plugins with a selected supplier or wrap.

    In a run that does not train (`run.trains` is False), a step is a forward pass. It runs eagerly unless the model,
    the strategies, the adapters, and the plugins with a selected supplier or wrap return True.

    Called when the slots are filled, before launch and on every rank.
    """


@at_most_one
def shard_states(run: "Run", model: "Model") -> "Sharding | None":
    """What each rank owns of masters, optimizer state and gradients (ZeRO); None if every rank keeps its own whole.

    Parameters may be cut anywhere, whatever the optimizer computes: it asks the host for whole matrices. Pure, and also
    called before launch: the host allocates memory and makes pieces by the answer. In `wrap_model` the same plugin sums
    each gradient onto its owner, and appends to `model.exchanges` the `WeightExchange` that sends the new weights from
    the owners. Frozen parameters (`placement.parameter.trainable` is False) have no such states: the host refuses
    a sharding that contains a frozen parameter.

    A strategy that runs the engine of another framework returns a sharding with an `engine`. It declines gradient
    sinks: parameters get an ordinary `.grad`, and the same plugin supplies the pieces (`model.supply`) and the stepper.
    """


@all_plugins
def wrap_model(run: "Run", model: "Model") -> None:
    """Wrap units (FSDP), or sum gradients by listening to their sinks (data parallelism).

    The host calls the plugins in the order of their `layer` attributes (integers, 0 if absent), the innermost first.
    `model.run` may be wrapped.

    - A plugin that sums a gradient sums it over the parameter's `Placement.data_axes`; `model.data_groups(run)` makes
      the process groups. It names these axes in `model.sinks.reduced_over`. Only one strategy sums a parameter.
    - A plugin that gathers parameters adds the gradient that it has reduced to the sink (`GradientSink.contribute`).
    - If a plugin has declared an axis by `varies`, only that plugin sums over it: the host refuses any other sum.
    - Frozen parameters have no sinks, and a stage may have frozen parameters only. All ranks must still ask for the
      same process groups and name the same axes; the host refuses a run whose ranks name different ones.
    - In a run that does not train (`run.trains` is False), all parameters are frozen, and the host has not called
      `shard_states`. It then calls this hook only for commands that evaluate the model.
    """


@exactly_one
def build_optimizer(run: "Run", pieces: "list[Piece]", assembler: "Assembler") -> "Optimizer":
    """Build the optimizer of this rank's pieces. It updates them; the host sums gradients and sets the schedules.

    A piece may be any part of a parameter. `assembler` brings together what other ranks hold, for updates that need
    whole matrices (`assembler.matrices`). Every rank must call its methods alike, also a rank without pieces.

    If the config has groups of parameters (`optimizer.groups`), the host calls the hook for each of them, on every rank
    in the same order: that of the group's own optimizer, if the group names one. So an optimizer must keep everything
    in the object that it returns.
    """


@all_plugins
def wrap_optimizer(run: "Run", model: "Model", optimizer: "Optimizer", pieces: "list[Piece]") -> "Optimizer | None":
    """An optimizer around that of the run, which adds to every update (the outer step of DiLoCo); None: no change.

    Called in the order of the plugins' `layer` attributes, when the optimizer of all pieces is built: on every rank,
    and before launch with tensors without memory. Building must not read values, or communicate. It may make groups.
    """


@all_plugins
def sends(run: "Run", model: "Model") -> "Sequence[Traffic] | None":
    """What the rank `run.rank` sends in some steps only, beside the passes of a step: for `mplug explain`. Pure."""


@at_most_one
def rate_of_width(parameter: "Parameter") -> "float | None":
    """The factor on this optimizer's learning rate of a parameter that is wider than in the base model. Pure.

    `parameter.widths` says how much wider (maximal update parametrization, arXiv 2203.03466); then the best rate of the
    base model is also that of wider models. Elements of Adam's updates have a size of their own, so its factor is
    1 / widths.inputs. The host divides the weight decay by the factor, so that the product with the learning rate is
    that of the base model. A model without a base model does not need the hook; a run of a model with one is refused
    if the optimizer of a parameter lacks it, or raises UsageError because its settings do not transfer.
    """


@at_most_one
def build_tokenizer(run: "Run") -> "Any | None":
    """The tokenizer of this data: text to tokens and back (`mplug_tokenization.Tokenizer`).

    Commands that read or write text use it. A plugin of the kind `tokenizers` implements this hook too. The host then
    calls it without a run, and the answer is a `mplug_tokenization.CorpusTokenizer`.
    """


@exactly_one
def build_loader(run: "Run", split: "Literal['train', 'validation']") -> "Loader":
    """The loader of a split's micro batches on this rank.

    Called on every rank for 'train', and also for 'validation' if `trainer.eval_every` is not 0. Micro batches are
    tensors on the CPU, whatever `run.device` is: the host copies them to the device while the device computes. The host
    checks each micro batch before that, and counts the samples: a loader has no end. Raise UsageError for bad data, and
    name the file and the sample. The host reports any other exception as a bug of the plugin.
    """


@at_most_one
def build_stepper(run: "Run", model: "Model", default: "DefaultStepper") -> "Stepper":
    """A stepper that replaces the host's `default`, which computes one micro batch after the other.

    For a strategy that runs the whole model in another way, such as the engine of another framework. A strategy that
    divides the model into stages states its stepper in `build_pipeline`; the host refuses a run with both.

    If your stepper changes only how gradients are computed, it passes `update` on to the default. Its backward pass
    begins with `default.loss_gradient(loss)`, which is the loss scale in fp16.

    In a run that does not train (`run.trains` is False), `default` is an `Evaluator`, and the host calls only the
    method `evaluate` of the answer.
    """


# Checkpoints.


@all_plugins
def state(run: "Run") -> "dict[str, Stateful]":
    """Named objects whose state a checkpoint must hold, beyond parameters, optimizer, schedule and loader.

    Called once, on every rank. A state must be the same on all ranks: a checkpoint holds that of rank 0, and every rank
    loads it.
    """
