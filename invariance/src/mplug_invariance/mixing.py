"""Mixing of tokens: the declarations of modules, and the refusal of layouts that would compute them wrongly.

A module *mixes* a named axis if, outside of slots, its result at one index of the axis depends on another index. A scan
or a convolution mixes `sequence`; tokens that compete for places mix `batch` and `sequence`. The class declares it, in
the coordinates of its input; a property may declare it if it depends on the configuration:

    mixes: ClassVar[frozenset[str]] = frozenset({"sequence"})

A declaration covers the code of its class and the code that the class inherits. Submodules have declarations of their
own. A module without a declaration is unknown; the host refuses it under a layout that could compute it wrongly.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import isfunction
from typing import Any

from torch import nn

from mplug.errors import UsageError, listed, suggest
from mplug.layout.mesh import Axis
from mplug.layout.names import matching, role_of
from mplug.layout.plan import TOKENS_AXIS
from mplug.model.model import Model
from mplug.run.run import Run
from mplug_invariance.statement import Statement

NAME = "mixes"
"""The attribute by which a class declares the axes that its modules mix."""
SAMPLES, UNITS = "batch", "units"
"""The named axes that data parallelism and pipeline parallelism divide."""
MICRO_BATCH = "trainer.micro_batch_size"
INDEX_OF = {"sequence": "position", "batch": "sample"}
"""The word for an index of a named axis."""
CONTAINERS = (nn.Module, nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList)
"""Torch's container modules, which are never called."""
POSITION_WISE = frozenset(
    {nn.Sequential, nn.Identity, nn.Linear, nn.Embedding, nn.Dropout}
    | {nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid, nn.Mish}
    | {nn.ReLU, nn.ReLU6, nn.SELU, nn.Sigmoid, nn.SiLU, nn.Softplus, nn.Softsign, nn.Tanh, nn.Tanhshrink}
)
"""Torch's modules that process each vector of the last dimension independently."""
NORMS = (nn.LayerNorm, nn.RMSNorm)
"""Torch's modules that do so if they normalise the last dimension only."""
NO_CODE = frozenset({"__init__", "__repr__", "extra_repr"})
"""Methods that a subclass may define without a new declaration, because they compute nothing."""


def statements(model: Model) -> list[Statement]:
    """The declaration of every module of the plan's units, in order.

    Raises UsageError if a declaration is invalid, or names an axis that the plan does not have.
    """
    of_plan = _of_plan(model)
    by_name = dict[str, Statement]()
    for unit in model.plan.units:
        for name, module in _modules_of(model, unit.name):
            by_name[name] = Statement(name, module, _axes_of(name, module, of_plan), unit.sequence)
    axes = model.plan.named_axes
    for statement in by_name.values():
        for axis in sorted((statement.axes or frozenset()) - axes):
            raise UsageError(
                f"{statement.label} declares that it mixes '{axis}', and no parameter, entry or activation of the plan "
                f"has this axis{suggest(axis, axes)}"
            )
    return list(by_name.values())


def _modules_of(model: Model, unit: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a unit, including itself; none if the unit belongs to another stage."""
    try:
        part = model.module.get_submodule(unit)
    except AttributeError:
        return
    yield from part.named_modules(prefix=unit)


def _of_plan(model: Model) -> dict[str, frozenset[str]]:
    """The plan's declarations (`Plan.mixing`), by module name."""
    names = [name for name, _ in model.module.named_modules() if name]
    declarations = dict[str, frozenset[str]]()
    for pattern, axes in model.plan.mixing.items():
        hits = matching(pattern, names)
        if not hits and len(model.own_units) in (0, len(model.plan.units)):  # not those of another stage
            raise UsageError(f"the plan's mixing: no module matches '{pattern}'{suggest(pattern, names)}")
        declarations |= dict.fromkeys(hits, _as_axes(axes, f"the plan's mixing of '{pattern}'"))
    return declarations


def _axes_of(name: str, module: nn.Module, of_plan: Mapping[str, frozenset[str]]) -> frozenset[str] | None:
    if name in of_plan:
        if declared(name, module) is not None and not type(module).__module__.startswith("torch.nn.modules"):
            raise UsageError(
                f"the plan's mixing and the class {type(module).__qualname__} both declare what '{name}' mixes; remove "
                f"the declaration from the plan"
            )
        return of_plan[name]
    axes = declared(name, module)
    if axes is None and any(name.startswith(f"{outer}.") for outer in of_plan):
        return frozenset()  # the plan's declaration of an enclosing module covers it
    return axes


def declared(name: str, module: nn.Module) -> frozenset[str] | None:
    """The axes that a module's class declares; None if no declaration covers the code that the class runs.

    An inherited declaration does not cover a class with methods of its own, because it runs other code than its base.
    """
    kind = type(module)
    if NAME in vars(module):
        raise UsageError(
            f"the module '{name}' sets `{NAME}` on itself; make it an attribute or a property of its class "
            f"{kind.__name__}"
        )
    for base in kind.__mro__:
        if NAME in vars(base):
            return _as_axes(getattr(module, NAME), f"`{NAME}` of {kind.__qualname__}")
        if base.__module__.startswith("torch.nn.modules"):
            return _of_torch(module) if base is kind else None
        if any(_computes(attribute, value) for attribute, value in vars(base).items()):
            return None
    return None


def covers(kind: type, attribute: str) -> bool:
    """Whether a class, or one whose code it runs unchanged, has an attribute that declares something about its code.

    It is the rule of `declared` for declarations about which torch's own modules say nothing.
    """
    for base in kind.__mro__:
        if attribute in vars(base):
            return True
        if base.__module__.startswith("torch.nn.modules") or any(_computes(*one) for one in vars(base).items()):
            return False
    return False


def _computes(attribute: str, value: object) -> bool:
    return attribute not in NO_CODE and (isfunction(value) or isinstance(value, property | staticmethod | classmethod))


def _of_torch(module: nn.Module) -> frozenset[str] | None:
    kind = type(module)
    by_vectors = kind in NORMS and len(module.normalized_shape) == 1  # type: ignore[arg-type]
    return frozenset() if kind in POSITION_WISE or kind in CONTAINERS or by_vectors else None


def _as_axes(value: Any, owner: str) -> frozenset[str]:
    if isinstance(value, str) or not isinstance(value, Iterable) or not all(isinstance(axis, str) for axis in value):
        raise UsageError(f"{owner} is {value!r}; it must be a set of named axes, such as frozenset({{'sequence'}})")
    return frozenset(value)


def mixes_samples(model: Model) -> bool:
    """Whether a module of the model mixes the samples of a micro batch, so that its size changes what is computed."""
    return any(SAMPLES in (statement.axes or ()) for statement in model.mixing)


def divides_samples_alone(axis: Axis) -> bool:
    """Whether ranks along a mesh axis have different samples and the same parts of the model."""
    return SAMPLES in axis.entries and not axis.splits


@dataclass(frozen=True)
class _Case:
    """A mesh axis divides a named axis that a module mixes, or may mix."""

    label: str
    axis: Axis
    named: str
    statement: Statement


def refuse_mixing(run: Run, model: Model) -> tuple[Statement, ...]:
    """The declarations of a whole model's modules; call it while the model has the units of all stages.

    Raises UsageError if the layout divides an axis that a module mixes, or may mix, and no strategy supports it.
    """
    declarations = tuple(statements(model))
    refuse_unknown_axes(run, model)
    owners = {axis.name: label for label, axes in run.hooks.each("mesh_axes", config=run.config) for axis in axes}
    cases = [
        _Case(owners.get(axis.name, "the layout"), axis, named, statement)
        for axis in run.mesh.axes.values()
        for statement in declarations
        for named in sorted(_at_risk(statement, axis))
        if axis.size > 1
    ]
    of_samples = [case for case in cases if case.named == SAMPLES and SAMPLES in case.axis.entries]
    of_other_axes = [case for case in cases if case not in of_samples]
    problems = [*_of_samples(run, of_samples), *_unsupported(run, model, of_other_axes)]
    if problems:
        raise UsageError("\n".join(problems))
    return declarations


def _at_risk(statement: Statement, axis: Axis) -> frozenset[str]:
    """The named axes, divided by a mesh axis, along which a module would or could be computed wrongly.

    For a module without a declaration these exclude the samples: by the contract of every model, no sample changes the
    loss of another.
    """
    if statement.axes is None:
        divided = frozenset(axis.entries) - {SAMPLES} | frozenset(axis.activations) - {UNITS}
        return divided if statement.rows_divided_by(axis) else divided - {TOKENS_AXIS}
    return frozenset(
        named
        for named in statement.axes
        if (statement.rows_divided_by(axis) if named in (TOKENS_AXIS, statement.sequence) else axis.divides(named))
    )


def _of_samples(run: Run, cases: list[_Case]) -> Iterator[str]:
    """The problems of modules that mix samples, if the content of a micro batch depends on the layout.

    Data-parallel ranks have the micro batches of one process if `trainer.micro_batch_size` is set.
    """
    if not cases:
        return
    trainer, (_, shards) = run.config.trainer, run.mesh.batch_shard(run.rank)
    mixed = f"{_mixers(case.statement for case in cases)} the samples of a micro batch"
    if trainer.micro_batch_size is None:
        yield (
            f"{mixed}, and trainer.micro_batch_size is null, so the content of a micro batch depends on the {shards} "
            f"data-parallel ranks; set trainer.micro_batch_size"
        )
    elif trainer.eval_every and trainer.eval_samples % (trainer.micro_batch_size * shards):
        least = trainer.micro_batch_size * shards
        yield (
            f"{mixed}, and trainer.eval_samples={trainer.eval_samples} is no multiple of "
            f"{trainer.micro_batch_size} x {shards} data-parallel ranks, so the content of a micro batch depends on "
            f"the layout; set trainer.eval_samples to a multiple of {least}"
        )


def _unsupported(run: Run, model: Model, cases: list[_Case]) -> Iterator[str]:
    """A sentence for each mesh axis, named axis and reason for which the axis's strategy does not support mixing."""
    mixing = dict[str, frozenset[str]]()
    for case in cases:
        mixing[case.statement.name] = mixing.get(case.statement.name, frozenset()) | {case.named}
    answers: dict[str, Mapping[str, bool | str]] = {}
    if mixing:
        answers = dict(run.hooks.each("support_mixing", run=run, model=model, mixing=mixing))
    refused = dict[tuple[str, str, str, str, bool], list[Statement]]()
    for case in cases:
        answer = answers.get(case.label, {}).get(case.statement.name, False)
        if answer is not True:
            reason = answer if isinstance(answer, str) else ""
            key = (case.label, case.axis.name, case.named, reason, case.statement.axes is None)
            refused.setdefault(key, []).append(case.statement)
    for (label, axis, named, reason, is_unknown), mixers in refused.items():
        divides = f"{label} divides the {named} ({axis}={run.mesh.axes[axis].size})"
        index = INDEX_OF.get(named, f"index of the {named}")
        depends = f"one {index} depends on another outside of slots"
        remedy = f"use a layout without {label.rpartition('/')[2]}{reason and f', or {reason}'}"
        if is_unknown:
            yield (
                f"{divides}, and no declaration states whether {_mixers(mixers)} it (whether {depends}); "
                f"{_declarations(model, mixers, named)}; or {remedy}"
            )
        else:
            yield f"{divides}, and {_mixers(mixers)} it ({depends}); {remedy}"


def _mixers(of: Iterable[Statement]) -> str:
    """Subject and verb of a sentence: "'blocks.*.scan' (Recurrence) mixes"."""
    labels = list(dict.fromkeys(statement.label for statement in of))
    return f"{listed(labels)} {'mixes' if len(labels) == 1 else 'mix'}"


def _declarations(model: Model, undeclared: list[Statement], named: str) -> str:
    """The declarations to add: to the classes, or to the plan if a class is from another package than the model."""
    package = _package_of(model.module)
    own = [statement for statement in undeclared if _package_of(statement.module) == package]
    added = []
    if own:
        classes = listed(dict.fromkeys(statement.kind for statement in own))
        added.append(f"add to {classes} `{NAME} = frozenset({{'{named}'}})` if so, `{NAME} = frozenset()` if not")
    foreign = dict.fromkeys(role_of(statement.name) for statement in undeclared if statement not in own)
    if foreign:
        patterns = ", ".join(f"'{role}': ('{named}',)" for role in foreign)
        added.append(f"add to the plan `mixing={{{patterns}}}` if so, with () if not")
    return "; ".join(added)


def _package_of(module: nn.Module) -> str:
    return type(module).__module__.partition(".")[0]


def refuse_unknown_axes(run: Run, model: Model) -> None:
    """Raise UsageError if the plan or a strategy names an axis that no entry, activation or parameter has."""
    known_axes, plan = model.plan.named_axes, model.plan
    over = {f"parameter '{pattern}'": parameter.over for pattern, parameter in plan.parameters.items()}
    over |= {f"buffer '{pattern}'": buffer.over for pattern, buffer in plan.buffers.items()}
    for owner, axes in over.items():
        for named in sorted(set(axes) - known_axes):
            raise UsageError(
                f"the plan declares that {owner} is over '{named}', and no parameter, entry or activation has this axis"
                f"{suggest(named, known_axes)}"
            )
    entries = {named for axes in plan.context.values() for named in axes}
    flowing = entries.union(*plan.activations.values())
    for label, axes in run.hooks.each("mesh_axes", config=run.config):
        for axis in axes:
            _refuse_unknown(f"{label} divides '{{}}' of batch entries, and no entry", axis.entries, entries)
            within = set(axis.activations) - {UNITS}
            _refuse_unknown(f"{label} divides '{{}}' of activations, and no entry or activation", within, flowing)


def _refuse_unknown(sentence: str, axes: Iterable[str], known_axes: Iterable[str]) -> None:
    for axis in sorted(set(axes).difference(known_axes)):
        raise UsageError(f"{sentence.format(axis)} of the model's plan has this axis{suggest(axis, known_axes)}")
