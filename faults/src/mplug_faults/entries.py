"""Optional entries of micro batches that the loader and the model of a run do not share."""

from typing import TYPE_CHECKING

from mplug.contracts.micro_batch import OF_OBJECTIVES, SEQUENCES
from mplug.errors import UsageError, listed

if TYPE_CHECKING:
    from mplug.model.built import Built
    from mplug.run.run import Run


def refuse_unused_entries(run: "Run", model: "Built", of_loader: frozenset[str]) -> None:
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


def refuse_missing_entries(run: "Run", model: "Built") -> None:
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
