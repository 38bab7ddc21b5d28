"""DeepSpeed's partitions as a `Sharding`, and refusals of what its engine cannot do. Without torch and DeepSpeed."""

from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

from mplug import Bucket, Engine, Sharding, UsageError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from mplug import Model, Run, RunConfig
    from mplug_deepspeed.settings import Settings

from mplug_deepspeed.rules import AXIS
from mplug_deepspeed.validation import refuse_invalid

ALIGNED = 2
"""Stages 1 and 2 pad the flat weights to a multiple of this many elements per rank: DeepSpeed's alignment for NCCL."""


def refuse_rivals(config: "RunConfig") -> None:
    """Refuse strategies that divide the layers, or the states of the same parameters, and a known wrong precision."""
    if config.trainer.precision == "fp64":
        raise _wrong_precision("fp64")
    for chosen in config.chosen:
        name = chosen.label.rpartition("/")[2]
        if chosen.label == f"parallel/{AXIS}":
            continue
        if hasattr(chosen.plugin, "build_pipeline"):
            raise UsageError(
                f"layout '{config.parallel.layout}': {chosen.label} runs parts of the model in a schedule of its own, "
                f"and the engine of parallel/{AXIS} runs the whole model; use a layout without '{name}' or without "
                f"'{AXIS}'"
            )
        if hasattr(chosen.plugin, "shard_states"):
            raise UsageError(
                f"layout '{config.parallel.layout}': {chosen.label} and parallel/{AXIS} both shard the optimizer state "
                f"of the same parameters; use a layout with only one of them"
            )


def sharding_of(run: "Run", model: "Model", settings: "Settings") -> Sharding:
    """The partitions that DeepSpeed makes on this rank's parameters; UsageError if its engine cannot run the model."""
    _refuse_precision(run)
    settings.checked(run)
    if run.groups is None and settings.raw:
        refuse_invalid(run, settings)
    trained = [name for name, parameter in model.parameters().items() if parameter.requires_grad]
    axes = model.placements[trained[0]].data_axes
    for name in trained:
        if model.placements[name].gathered_along is not None or model.placements[name].data_axes != axes:
            raise UsageError(
                f"DeepSpeed sums all gradients over the same ranks, and the gradient of '{name}' is summed over others "
                f"than that of '{trained[0]}' (experts, or weights that another strategy shards); use a layout without "
                f"'{AXIS}'"
            )
    if settings.stage == 3:
        _refuse_partial_models(model)
    ranks = prod(run.mesh.axes[axis].size for axis in axes)
    sizes = {name: prod(model.placements[name].local_shape(run.rank)) for name in trained}
    if settings.stage == 3:
        buckets = tuple(
            Bucket((name,), (0,), (size,), -(-size // ranks) * ranks, axes, num_owners=ranks)
            for name, size in sizes.items()
        )
    else:
        *starts, end = accumulate(sizes.values(), initial=0)
        length = -(-end // (ALIGNED * ranks)) * ALIGNED * ranks
        buckets = (Bucket(tuple(sizes), tuple(starts), tuple(sizes.values()), length, axes, num_owners=ranks),)
    num_bytes = _num_bytes(run, buckets, ranks, settings)
    return Sharding(buckets, engine=Engine(num_bytes, partial(_states_of, settings)))


def _states_of(settings: "Settings") -> "AbstractContextManager[object]":
    """The context in which the optimizer makes its states."""
    folder = settings.folder("offload_optimizer")
    if folder is None:
        return nullcontext()
    from mplug_deepspeed.files import StatesInFiles  # imports torch

    return StatesInFiles(folder)


def _num_bytes(run: "Run", buckets: tuple[Bucket, ...], ranks: int, settings: "Settings") -> dict[str, int]:
    """The bytes that the engine keeps on a rank, with its padding."""
    width = 4 if run.precision.weights == "float32" else 2
    elements = sum(bucket.length for bucket in buckets)
    own, numel = elements // ranks, sum(sum(bucket.sizes) for bucket in buckets)
    words = {"none": "", "cpu": ", in the host's memory", "nvme": ", in files"}
    on_host, weights_on_host = words[settings.device("offload_optimizer")], words[settings.device("offload_param")]
    staged = settings.accumulates_in(run.precision.weights)
    found = {f"weights{weights_on_host}": (own if settings.stage == 3 else elements) * width}
    found[f"masters{on_host}"] = own * 4
    found["gradients"] = {1: numel * width, 2: own * width, 3: own * staged}[settings.stage]
    found[f"gradients of an update{on_host}"] = own * 4
    found["buffers of gradient sums"] = settings.reduce_bucket(run) * width * (2 if settings.overlap_comm else 1)
    return found


def _refuse_precision(run: "Run") -> None:
    precision = run.precision
    plain = precision.recipe is None and precision.masters == "float32"
    if not plain or precision.weights not in ("float32", "bfloat16", "float16"):
        raise _wrong_precision(run.config.trainer.precision)


def _wrong_precision(word: str) -> UsageError:
    return UsageError(
        f"trainer.precision={word}: DeepSpeed computes in fp32, bf16 or fp16, with masters in fp32; use one of these, "
        f"or a layout without '{AXIS}'"
    )


def _refuse_partial_models(model: "Model") -> None:
    """Stage 3 gathers the weights of a unit when the unit is called, and keeps no frozen weights in checkpoints."""
    for name, parameter in model.parameters().items():
        if not parameter.requires_grad:
            raise UsageError(
                f"parallel.{AXIS}.stage=3 shards all weights, and '{name}' is frozen: it would have no values to save; "
                f"use stage 2"
            )
    for unit in model.plan.units:
        if unit.method != "forward":
            raise UsageError(
                f"parallel.{AXIS}.stage=3 gathers weights when a unit's forward is called, and unit '{unit.name}' is "
                f"called by '{unit.method}'; use stage 2"
            )
