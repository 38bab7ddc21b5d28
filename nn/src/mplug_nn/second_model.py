"""A second, frozen model that computes on the micro batches of a run beside the trained one: a teacher, say."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import nn

from mplug.contracts.micro_batch import DOCUMENTS
from mplug.errors import UsageError
from mplug.layout.plan import Buffer, Parameter, Plan, Unit
from mplug.layout.work import Flops
from mplug_nn.inner_plan import plan_within
from mplug_nn.objective import Objective, end_of

if TYPE_CHECKING:
    from mplug.model.model import Model
    from mplug.run.run import Run

Value = TypeVar("Value")


class FrozenModel(nn.Module):
    """The submodules of a model that is not trained: they always compute as in an evaluation, without dropout."""

    mixes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, parts: Iterable[tuple[str, nn.Module]]) -> None:
        super().__init__()
        for name, part in parts:
            self.add_module(name, part)
        self.train(False)

    def train(self, mode: bool = True) -> "FrozenModel":
        """Stay in evaluation."""
        super().train(False)
        return self


def add_frozen_model(run: "Run", model: "Model", other: "Model", name: str, label: str) -> None:
    """Let the units of another model run before those of `model`, under the same layout. Call it in `adapt_model`.

    `model` has the objective of `label` already (`set_objective`). The other model's head becomes the attribute `name`
    of this objective, and its `forward` gets the vectors that enter that head by the name `beside` [B, S / R, D]. The
    other parameters have names that begin with `name`. All of them are frozen, and they may begin with a folder of
    their own (`checkpoint.pretrained.parts.NAME`).

    Raises UsageError for a model that does not end in a `Head`, has streams, predicts tokens further ahead, or does not
    confine attention to the documents of the run's micro batches.
    """
    unit, head = end_of(other, f"{label}.{name}")
    _refuse_unfit(run, other.plan, f"{label}.{name}", [*other.module.named_parameters(recurse=False)])
    ours, own_head = end_of(model, label)
    objective = own_head.loss
    assert isinstance(objective, Objective)
    setattr(head, "loss", None)  # noqa: B010 (mypy knows the attribute as a module)
    delattr(other.module, unit.name)
    model.module.add_module(name, FrozenModel(other.module.named_children()))
    objective.add_module(name, FrozenModel([("head", head)]))
    place = f"{ours.name}.loss.{name}."
    places = {f"{name}.{unit.name}.": f"{place}head."}
    model.beside = (*model.beside, f"{name}.", place)
    model.plan = _joined(model.plan, _placed(plan_within(other.plan, name), places), ours, name)


def _refuse_unfit(run: "Run", plan: Plan, label: str, loose: list[Any]) -> None:
    """Raise UsageError for a model that cannot compute beside another one."""
    reasons = {
        "has rows of another kind than tokens": bool(plan.streams),
        "predicts tokens further ahead; set num_mtp_layers=0 in its section": bool(plan.shifted),
        "reads texts of an encoder": plan.answering is not None,
        "states its FLOPs by hand (Plan.work)": plan.work is not None,
        "has parameters outside of its units": bool(loose),
        "does not take 'document_lengths', so its tokens would see other documents; use data without them": (
            DOCUMENTS in run.entries and not any(DOCUMENTS in (*one.inputs, *one.optional) for one in plan.units)
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise UsageError(f"{label}: the model {reason}; or use another model")


def _placed(plan: Plan, places: Mapping[str, str]) -> Plan:
    """The plan of a model whose modules with these prefixes have others."""

    def renamed(name: str) -> str:
        for before, after in places.items():
            if name.startswith(before):
                return f"{after}{name.removeprefix(before)}"
        return name

    def all_renamed(entries: Mapping[str, Value]) -> dict[str, Value]:
        return {renamed(name): entry for name, entry in entries.items()}

    external = plan.external
    if external is not None:
        copies = {public: renamed(ours) for public, ours in external.copies.items()}
        external = replace(external, tensors=all_renamed(external.tensors), copies=copies)
    return replace(
        plan,
        parameters=all_renamed(plan.parameters),
        buffers=all_renamed(plan.buffers),
        mixing=all_renamed(plan.mixing),
        tied=tuple(tuple(map(renamed, group)) for group in plan.tied),
        base_modules=tuple(map(renamed, plan.base_modules)),
        external=external,
    )


def _joined(plan: Plan, other: Plan, end: Unit, name: str) -> Plan:
    """The plan whose unit `end` takes what enters the last unit of the other plan, whose other units run first."""
    own = {activation: f"{name}_{activation}" for activation in other.activations}
    *units, last = (
        replace(
            unit,
            inputs=tuple(own.get(one, one) for one in unit.inputs),
            outputs=tuple(own.get(one, one) for one in unit.outputs),
        )
        for unit in other.units
    )
    (entering,) = (one for one in last.inputs if one in own.values())
    hidden, *rest = end.inputs
    changed = replace(end, inputs=(hidden, entering, *rest), method="forward_beside")
    crossing = {one for unit in units for one in unit.outputs}
    external = plan.external
    if external is not None:
        absent = dict.fromkeys((*other.parameters, *(n for n, one in other.buffers.items() if not one.is_statistic)))
        external = replace(external, tensors={**external.tensors, **absent})
    return replace(
        plan,
        units=(*units, *(changed if one is end else one for one in plan.units)),
        parameters={**plan.parameters, **{one: _frozen(entry) for one, entry in other.parameters.items()}},
        buffers={**plan.buffers, **{one: _silent(entry) for one, entry in other.buffers.items()}},
        context={**other.context, **plan.context},
        activations={
            **plan.activations,
            **{own[one]: axes for one, axes in other.activations.items() if own[one] in crossing},
        },
        flops=Flops.sum((plan.flops, other.flops)),
        tied=(*plan.tied, *other.tied),
        mixing={**plan.mixing, **other.mixing},
        base_modules=(*plan.base_modules, *other.base_modules),
        external=external,
        parts={**plan.parts, **({name: other.external} if other.external is not None else {})},
    )


def _frozen(entry: Parameter) -> Parameter:
    return replace(entry, trainable=False)


def _silent(entry: Buffer) -> Buffer:
    return replace(entry, reported=False)
