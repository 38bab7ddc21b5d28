"""Mixing of tokens: the declarations of modules, and the refusal of layouts that would compute them wrongly.

A module *mixes* a named axis if, outside of slots, its result at one index of the axis depends on another index. A scan
or a convolution mixes `sequence`; experts with a capacity mix `batch` and `sequence`. The class declares it, in the
coordinates of its input; a property may declare it if it depends on the configuration:

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
from mplug.model.mixing_statement import Statement
from mplug.model.model import Model
from mplug.run.run import Run

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
    outside = _of_plan(model)
    found = dict[str, Statement]()
    for unit in model.plan.units:
        for name, module in _modules_of(model, unit.name):
            found[name] = Statement(name, module, _axes_of(name, module, outside))
    known = named_axes(model)
    for one in found.values():
        for axis in sorted((one.axes or frozenset()) - known):
            raise UsageError(
                f"{one.told} says that it mixes '{axis}', which is an axis of no parameter, entry or activation of the "
                f"plan{suggest(axis, known)}"
            )
    return list(found.values())


def named_axes(model: Model) -> frozenset[str]:
    """Every named axis of the plan's entries, activations, parameters and buffers."""
    plan = model.plan
    flowing = [axis for axes in (*plan.context.values(), *plan.activations.values()) for axis in axes]
    return frozenset(flowing).union(
        *(one.axes for one in plan.parameters.values()), *(one.axes for one in plan.buffers.values())
    )


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
    found = dict[str, frozenset[str]]()
    for pattern, axes in model.plan.mixing.items():
        hits = matching(pattern, names)
        if not hits and len(model.own_units) in (0, len(model.plan.units)):  # not those of another stage
            raise UsageError(f"no module matches '{pattern}' of the plan's mixing{suggest(pattern, names)}")
        found |= dict.fromkeys(hits, _as_axes(axes, f"the plan's mixing of '{pattern}'"))
    return found


def _axes_of(name: str, module: nn.Module, outside: Mapping[str, frozenset[str]]) -> frozenset[str] | None:
    if name in outside:
        if declared(name, module) is not None and not type(module).__module__.startswith("torch.nn.modules"):
            raise UsageError(
                f"both the plan's mixing and the class {type(module).__qualname__} say what '{name}' mixes; leave it "
                f"to the class"
            )
        return outside[name]
    own = declared(name, module)
    if own is None and any(name.startswith(f"{above}.") for above in outside):
        return frozenset()  # the plan's declaration of an enclosing module covers it
    return own


def declared(name: str, module: nn.Module) -> frozenset[str] | None:
    """The axes that a module's class declares; None if no declaration covers the code that the class runs.

    An inherited declaration does not cover a class with methods of its own, because it runs other code than its base.
    """
    kind = type(module)
    if NAME in vars(module):
        raise UsageError(f"'{name}' sets `{NAME}` as it is made; make it an attribute or a property of {kind.__name__}")
    for base in kind.__mro__:
        if NAME in vars(base):
            return _as_axes(getattr(module, NAME), f"`{NAME}` of {kind.__qualname__}")
        if base.__module__.startswith("torch.nn.modules"):
            return _of_torch(module) if base is kind else None
        if any(_computes(attribute, value) for attribute, value in vars(base).items()):
            return None
    return None


def _computes(attribute: str, value: object) -> bool:
    return attribute not in NO_CODE and (isfunction(value) or isinstance(value, property | staticmethod | classmethod))


def _of_torch(module: nn.Module) -> frozenset[str] | None:
    kind = type(module)
    by_vectors = kind in NORMS and len(module.normalized_shape) == 1  # type: ignore[arg-type]
    return frozenset() if kind in POSITION_WISE or kind in CONTAINERS or by_vectors else None


def _as_axes(value: Any, where: str) -> frozenset[str]:
    if isinstance(value, str) or not isinstance(value, Iterable) or not all(isinstance(one, str) for one in value):
        raise UsageError(f"{where} is {value!r}; it must be a set of named axes, such as frozenset({{'sequence'}})")
    return frozenset(value)


@dataclass(frozen=True)
class _Case:
    """A mesh axis divides a named axis that a module mixes, or may mix."""

    label: str
    axis: Axis
    named: str
    statement: Statement


def refuse_mixing(run: Run, model: Model) -> None:
    """Raise UsageError if the layout divides an axis that a module mixes, or may mix, and no strategy supports it.

    Call it while the model has the units of all stages. It stores the declarations in `model.mixing`.
    """
    model.mixing = found = tuple(statements(model))
    refuse_unknown_axes(run, model)
    owners = {axis.name: label for label, axes in run.hooks.each("mesh_axes", config=run.config) for axis in axes}
    cases = [
        _Case(owners.get(axis.name, "the layout"), axis, named, one)
        for axis in run.mesh.axes.values()
        for one in found
        for named in sorted(_at_risk(one, axis))
        if axis.size > 1
    ]
    of_samples = [case for case in cases if case.named == SAMPLES and SAMPLES in case.axis.entries]
    others = [case for case in cases if case not in of_samples]
    problems = [*_of_samples(run, of_samples), *_unsupported(run, model, others)]
    if problems:
        raise UsageError("\n".join(problems))


def _at_risk(one: Statement, axis: Axis) -> frozenset[str]:
    """The named axes, divided by a mesh axis, along which a module would or could be computed wrongly.

    For a module without a declaration these exclude the samples: by the contract of every model, no sample changes the
    loss of another.
    """
    if one.axes is None:
        return frozenset(axis.entries) - {SAMPLES} | frozenset(axis.activations) - {UNITS}
    return frozenset(named for named in one.axes if axis.divides(named))


def _of_samples(run: Run, cases: list[_Case]) -> Iterator[str]:
    """The problems of modules that mix samples, if the content of a micro batch depends on the layout.

    Data-parallel ranks have the micro batches of one process if `trainer.micro_batch_size` is set.
    """
    if not cases:
        return
    trainer, (_, shards) = run.config.trainer, run.mesh.batch_shard(run.rank)
    who = listed(dict.fromkeys(case.statement.told for case in cases))
    mixed = f"the samples of a micro batch are mixed in {who}"
    if trainer.micro_batch_size is None:
        yield (
            f"{mixed}, and trainer.micro_batch_size is null, so what is in one depends on the {shards} data-parallel "
            f"ranks; set trainer.micro_batch_size"
        )
    elif trainer.eval_every and trainer.eval_samples % (trainer.micro_batch_size * shards):
        least = trainer.micro_batch_size * shards
        yield (
            f"{mixed}, and trainer.eval_samples={trainer.eval_samples} is no multiple of "
            f"{trainer.micro_batch_size} times {shards} data-parallel ranks, so what is in one depends on the layout; "
            f"choose a multiple of {least}"
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
    for (label, axis, named, reason, is_unknown), who in refused.items():
        divides = f"{label} divides the {named} ({axis}={run.mesh.axes[axis].size})"
        sees = f"one {INDEX_OF.get(named, f'index of the {named}')} sees another there, outside of slots"
        remedy = f"use a layout without {label.rpartition('/')[2]}{reason and f', or {reason}'}"
        modules = listed(dict.fromkeys(one.told for one in who))
        if is_unknown:
            yield (
                f"{divides}, and nothing says whether it is mixed in {modules}, that is, whether {sees}; "
                f"{_declarations(model, who, named)}; or {remedy}"
            )
        else:
            yield f"{divides}, which is mixed in {modules}: {sees}; {remedy}"


def _declarations(model: Model, unknown: list[Statement], named: str) -> str:
    """The declarations to add: to the classes, or to the plan if a class is from another package than the model."""
    package = _package_of(model.module)
    own = [one for one in unknown if _package_of(one.module) == package]
    added = [f"add to {listed(dict.fromkeys(one.kind for one in own))}"] if own else []
    if own:
        added[0] += f" `{NAME} = frozenset({{'{named}'}})` if so, `{NAME} = frozenset()` if not"
    foreign = dict.fromkeys(role_of(one.name) for one in unknown if one not in own)
    if foreign:
        patterns = ", ".join(f"'{role}': ('{named}',)" for role in foreign)
        added.append(f"add to the plan `mixing={{{patterns}}}` if so, with () if not")
    return "; ".join(added)


def _package_of(module: nn.Module) -> str:
    return type(module).__module__.partition(".")[0]


def refuse_unknown_axes(run: Run, model: Model) -> None:
    """Raise UsageError if the plan or a strategy names an axis that nothing has: the name would have no effect."""
    known, plan = named_axes(model), model.plan
    over = {f"parameter '{pattern}'": one.over for pattern, one in plan.parameters.items()}
    over |= {f"buffer '{pattern}'": one.over for pattern, one in plan.buffers.items()}
    for what, axes in over.items():
        for named in sorted(set(axes) - known):
            raise UsageError(
                f"the plan says that {what} is over '{named}', which is an axis of no parameter, entry or activation"
                f"{suggest(named, known)}"
            )
    entries = {named for axes in plan.context.values() for named in axes}
    flowing = entries.union(*plan.activations.values())
    for label, axes in run.hooks.each("mesh_axes", config=run.config):
        for axis in axes:
            _refuse_unknown(f"{label} divides '{{}}' of batch entries, which no entry", axis.entries, entries)
            within = set(axis.activations) - {UNITS}
            _refuse_unknown(f"{label} divides '{{}}' of activations, which no entry or activation", within, flowing)


def _refuse_unknown(sentence: str, named: Iterable[str], known: Iterable[str]) -> None:
    for axis in sorted(set(named).difference(known)):
        raise UsageError(f"{sentence.format(axis)} of the model's plan has{suggest(axis, known)}")
