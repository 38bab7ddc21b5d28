"""Every hook, in the order of a run. This file is the manual of the plugin interface.

A plugin implements a hook by a method of the same name, marked `@hookimpl`; it may leave out arguments that it does not
need. Hooks build and observe: they are called a few times a run or once a step, never inside a layer. They are called
in the same order on every rank. An exception in a hook ends the run on every rank, except in observers.

Each hook says how many of the plugins that a run names may answer it: all, at most one, or exactly one.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from mplug.specification import all_plugins, at_most_one, exactly_one

if TYPE_CHECKING:
    from pathlib import Path

    from mplug.config import RunConfig
    from mplug.contracts import Loader, Optimizer, Piece, Record, Stateful, Stepper, Tokenizer, Variance
    from mplug.mesh import Axis
    from mplug.model import Model
    from mplug.plan import Stages
    from mplug.run import Run
    from mplug.sharding import Sharding
    from mplug.slots import Offer, Wrap
    from mplug.stepper import DefaultStepper

# Build: before any process starts, then again on every rank.


@all_plugins
def configure(config: "RunConfig") -> None:
    """Check your own section against the whole config; raise UsageError or ValueError. Called before torch is imported.

    Any other exception is reported as a fault of the plugin.
    """


@all_plugins
def mesh_axes(config: "RunConfig") -> "list[Axis]":
    """The axes that a parallel strategy adds to the mesh. Called before torch is imported.

    Where the views of the mesh need more ranks than the layout's strategies fill in the attention view, all are asked
    again, with a config whose layout names the strategy of `parallel.data` too.
    """


@all_plugins
def varies(config: "RunConfig") -> "Variance | None":
    """In what a run of this config differs, because of this plugin, from the run of one process by more than rounding.

    A strategy that answers None, or has no such hook, claims that losses and gradients are those of one process.
    `mplug explain` shows the reason, the suites use the tolerance, and the host refuses what would bypass the plugin.
    Pure, and called before torch is imported.
    """


@at_most_one
def batch_entries(config: "RunConfig") -> "tuple[str, ...] | None":
    """The optional entries that the loader's micro batches will have: ('document_lengths',) where it packs samples.

    Known before launch, so that a model that does not take them, or a kernel that cannot serve them, is refused then.
    Called once, before torch is imported.
    """


@exactly_one
def build_model(run: "Run") -> "Model":
    """The model and its plan, on the meta device: no memory, no random numbers."""


@at_most_one
def split_model(run: "Run", model: "Model") -> "Stages":
    """Which units make up each pipeline stage. Pure: the host keeps this rank's, and names stay global."""


@all_plugins
def support_mixing(
    run: "Run", model: "Model", mixing: "Mapping[str, frozenset[str]]"
) -> "Mapping[str, bool | str] | None":
    """Which modules that mix what your mesh axes divide compute under them what one process computes. Pure.

    `mixing` has the names of the modules in question, and the named axes that each mixes, or may mix, and that the
    layout divides. The answer gives, by name, True where the strategy supports whatever of these its own axes divide
    (it passes a scan's state on, or the module's input is whole there), or what the user can set so that it does
    ("set parallel.NAME.option=false"). What the answer lacks is refused. Called before the model is split, and only
    where there is such a module.
    """


@all_plugins
def shard_model(run: "Run", model: "Model") -> None:
    """Refine `model.placements` where a mesh axis alone does not say it. Rules of two strategies must be disjoint.

    Who divides parameters at rest, and gathers them to compute with, makes them `GatheredPlacement`s.
    """


@all_plugins
def offer(run: "Run", model: "Model") -> "list[Offer | Wrap]":
    """Suppliers and wraps for slots. Pure: offering changes nothing, the host selects and applies."""


@at_most_one
def shard_states(run: "Run", model: "Model", needs: "Literal['elements', 'matrices']") -> "Sharding | None":
    """What each rank owns of masters, optimizer state and gradients; None where all ranks keep all of theirs.

    `needs` is the optimizer's: a range of elements may be cut anywhere, or matrices must stay whole. Pure, and called
    before launch too: the host gives memory and makes pieces accordingly. In `wrap_model` the same plugin sums
    gradients onto their owners, and appends to `model.when_written` what sends weights from them. Frozen parameters
    (`placement.parameter.trainable` is False) have no such states: a sharding that has one is refused.
    """


@all_plugins
def wrap_model(run: "Run", model: "Model") -> None:
    """Wrap units (recompute, offload, FSDP) or listen to gradient sinks (data parallelism; one strategy a parameter).

    Called in the order of the plugins' `layer` attributes (an integer, 0 if absent), the innermost first. Whoever sums
    gradients does so over each parameter's `Placement.data_axes`, whose groups `model.data_groups(run)` makes. Whoever
    gathers parameters brings each sink what it has reduced (`GradientSink.contribute`). `model.run` may be wrapped. An
    axis that another plugin has declared by `varies` is that plugin's to sum over: the host refuses any other sum.
    Frozen parameters have no sinks, and a stage may have none but them; all ranks ask for the same groups all the same.
    """


@exactly_one
def build_optimizer(run: "Run", pieces: "list[Piece]") -> "Optimizer":
    """The optimizer of this rank's pieces. It updates them: summing gradients and the schedules are the host's."""


@at_most_one
def build_tokenizer(run: "Run") -> "Tokenizer | None":
    """What turns text into the tokens of this data and back; `mplug generate` needs it.

    A plugin of the kind `tokenizers` answers it without a run, and gives a `CorpusTokenizer`.
    """


@exactly_one
def build_loader(run: "Run", split: "Literal['train', 'validation']") -> "Loader":
    """The loader of a split's micro batches on this rank. Called for each split, on ranks that read data.

    Micro batches are tensors on the CPU whatever `run.device`: the host moves them there beside what is computed. The
    host checks each of them first, and counts the samples: a loader has no end. Raise UsageError for bad data, with the
    file and the sample; any other exception is reported as a bug of the plugin.
    """


@at_most_one
def build_stepper(run: "Run", model: "Model", default: "DefaultStepper") -> "Stepper":
    """What runs a step, where the host's `default` (one micro batch after the other) does not do.

    A stepper that changes only how gradients come about hands `update` on to the default. Backward begins with
    `default.loss_gradient(loss)`: the loss scale in fp16.
    """


# Every step.


@all_plugins
def parameters_updated(run: "Run") -> None:
    """The optimizer has updated this rank's pieces: gather parameters, cast them, update expert biases."""


@all_plugins
def state(run: "Run") -> "dict[str, Stateful]":
    """Named objects whose state a checkpoint must hold, beyond parameters, optimizer, schedule and loader.

    Asked once, on every rank. A state must be the same on all ranks: rank 0's is kept, and all ranks get it back.
    """


# Observers: they look and tell, on every rank, sorted by name, and never change a run.


@all_plugins
def run_started(run: "Run") -> None:
    """Everything is built and, if the run resumes, loaded; the first step follows."""


@all_plugins
def step_started(run: "Run") -> None:
    """The step numbered `run.step` (the first is 1) begins."""


@all_plugins
def step_finished(run: "Run", record: "Record") -> None:
    """The step numbered `record["step"]` is over and its figures are known; `record` is what metrics.jsonl gets.

    On a GPU it is told while the next step runs, and `run.step` is one ahead; what is saved was told before.
    """


@all_plugins
def checkpoint_saved(run: "Run", path: "Path") -> None:
    """A complete checkpoint is visible at `path`."""


@all_plugins
def run_failed(run: "Run", error: BaseException) -> None:
    """The run ends with `error`."""


@all_plugins
def run_finished(run: "Run") -> None:
    """The run has done its last step."""
