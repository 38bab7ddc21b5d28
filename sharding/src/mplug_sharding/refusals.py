"""Shardings that do not fit the model or the schedule of a pipeline."""

from mplug.errors import UsageError
from mplug.model.model import Model
from mplug.run.run import Run


def refuse_states_of_frozen(run: Run, model: Model) -> None:
    """Raise UsageError if a plugin shards the optimizer state of a frozen parameter, which has no state."""
    for name in model.sharding.of if model.sharding else ():
        if not model.placements[name].parameter.trainable:
            (label,) = run.hooks.implementers("shard_states")
            raise UsageError(
                f"{label} shards the optimizer state of '{name}', which is frozen and has none: the plugin ignores "
                f"Parameter.trainable of the placements; use a layout without it, or freeze nothing"
            )


def refuse_transient_gradients(run: Run, model: Model) -> None:
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
