"""The part of sampling in the build of a model: whether it samples with a cache, and with which kind.

A model samples with a cache if its modules declare enough:

- Every module declares what it mixes (`mixes`), and in evaluation none mixes positions or samples outside of slots. So
  the last positions can be computed alone, and several samples together.
- Every module with the slot `Attention.core`, `Scan.core` or `Convolution.core` declares that it serves a cache:

      caches: ClassVar[bool] = True

  Then it has `serve_cache()`, `new_cache(size)` and an attribute `cache`, as `mplug_nn.DotProductAttention` has them.
  `serve_cache()` assigns attributes that the module has, and changes nothing else.
  As for `mixes`, a declaration covers the code of its class and what the class inherits, not the code of subclasses.

Any other model samples one prompt at a time, and computes all its positions again for every token.

The caches are static (`mplug_nn.static_cache`) if all modules with this slot also declare

      static_cache: ClassVar[bool] = True

if all their cores offer 'static keys', if no pipeline divides the model, and if no ranks divide the positions of a call
among themselves. Otherwise the rows that a core receives grow with every token.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from mplug import ENCODER_TEXTS, Axis, Mesh, Model, Run, RunConfig, UsageError, hookimpl, slots_of
from mplug.commands import (
    AS_THEY_ARE,
    COMMAND,
    Filled,
    Instead,
    Selection,
    listed,
    modules_around,
    offered_in_plain_torch,
    prepare,
)
from mplug_invariance import covers, statements
from mplug_nn.specification import DOCUMENTS, STATIC_KEYS
from mplug_sampling.form import OWN, selected_undivided
from mplug_streams import Processor

LABEL = f"{COMMAND}sampling"
NAME = "caches"
"""The attribute by which a class declares that its modules serve a cache."""
STATIC = "static_cache"
"""The attribute by which a class declares that its modules also serve a static cache."""
CORE = "Attention.core"
STATEFUL = ("Scan.core", "Convolution.core")
"""Slots whose modules keep a state. They may declare that they mix the sequence: with their cache, only a call does."""
PROTOCOL = ("cache", "serve_cache", "new_cache")
OUTERMOST = 1 << 30
"""A layer outside of those of all adapters: what they add to the model declares something too."""


class Sampler:
    """The model of a run that samples, and how it samples. Its hooks take part in the build of the model.

    `padded`: the samples of a batch may have padding, because their lengths differ or the layout divides positions.
    `media`: prompts have media, so the model computes its streams (`sampling_run`).
    `graphs`: on a GPU, the step of a token is replayed as a CUDA graph, if all parts of the run can do so.

    The build sets the other attributes: `model`; `uncached`, why it samples without a cache (empty: it has one);
    `growing`, why its caches grow (empty: they are static); and `replaced`, messages about kernels of the config that
    plain torch replaces.
    """

    layer = OUTERMOST
    model: Model
    steps_stages: ClassVar[bool] = False
    """Whether what samples runs the stages of a pipeline for each step of a static cache (`Together`)."""

    def __init__(self, *, padded: bool = False, graphs: bool = False, media: bool = False) -> None:
        self.padded, self.graphs, self.media = padded, graphs, media
        self.uncached = self.growing = ""
        self.replaced: tuple[str, ...] = ()

    @hookimpl
    def adapt_model(self, run: Run, model: Model) -> None:
        """Let modules serve caches from now on, if the model can sample with them: sites then need what caches need.

        The model still has the units of all stages, so all ranks agree. Attention receives padding as a document of its
        own, so sites need documents if there may be padding.
        """
        _refuse_unable(run, model)
        self._refuse_divided(run)
        if self.media:
            _refuse_streams_in_text(run, model)
        if model.plan.answering is not None:
            run.entries |= {*ENCODER_TEXTS}
        self.model = model
        model.module.eval()  # some modules mix samples in training only
        self.uncached = _reason_against(model)
        self.padded = self.padded or self.multiple(run) > 1
        if self.uncached:
            return
        self._serve_caches(model)
        if self.padded:
            run.entries |= {DOCUMENTS}

    @hookimpl
    def offers_selected(self, run: Run, model: Model, selection: Selection) -> None:
        """Replace kernels that do not serve keys from a cache, and find out whether caches are static."""
        refuse_stages(run, model)
        self._refuse_parts(run, model)
        if owners := {*self.undivided_axes(run).values()}:
            own = selected_undivided(run, model, selection, owners)
            selection.filled, selection.units, selection.unmet = own.filled, own.units, own.unmet
        if not self.uncached:
            self._use_plain_attention(run, selection)
            self._use_static_attention(run, model, selection)
        self.growing = self.uncached or self._reason_against_static(run, model, selection)

    @hookimpl
    def captures(self) -> bool:
        """True: the steps of a token read no value of the CPU that differs between steps."""
        return True

    def own_units(self) -> Instead:
        """Functions that sampling calls in the place of units' methods, by the names of the units."""
        return AS_THEY_ARE

    def undivided_axes(self, run: Run) -> dict[str, str]:
        """The mesh axes that divide positions, but not when the model samples, with the labels of their strategies.

        Here, these are axes inside the model: each of their ranks computes all positions of a call.
        """
        able, owners = run.hooks.implementers(OWN), owners_of_axes(run)
        dividing = [axis.name for axis in run.mesh.axes.values() if axis.size > 1 and self._may_undivide(axis)]
        return {name: owners[name] for name in dividing if owners.get(name) in able}

    def _may_undivide(self, axis: Axis) -> bool:
        return axis.divides("sequence") and not axis.entries

    def multiple(self, run: Run) -> int:
        """The number that must divide the positions of a call."""
        return multiple_of_positions(run.mesh, self.undivided_axes(run))

    def sampling(self) -> AbstractContextManager[None]:
        """In the block, the modules of the model are as sampling needs them."""
        return nullcontext()

    def _serve_caches(self, model: Model) -> None:
        """Let modules serve caches from now on."""
        for module in _caching(model):
            module.serve_cache()

    @property
    def eager_because(self) -> str:
        """Why no step of a token repeats the shapes of the one before, as a clause; empty if the caches are static."""
        if self.uncached:
            return f"the model has no cache, because {self.uncached}"
        return f"its caches grow, because {self.growing}" if self.growing else ""

    def _use_plain_attention(self, run: Run, selection: Selection) -> None:
        """Let plain torch fill the attention cores that the config's kernel cannot compute with a cache.

        A kernel that trains a model need not serve keys from a cache.
        """
        kept, messages = [], dict[str, None]()
        for unmet in selection.unmet:
            by_kernel = unmet.site.slot in (CORE, *STATEFUL) and unmet.plugin in run.config.kernels.plugins
            if by_kernel and not unmet.site.lacking(offered_in_plain_torch(unmet.site)):
                messages[f"{unmet}; plain torch computes it"] = None
            else:
                kept.append(unmet)
        selection.unmet = kept
        self.replaced = tuple(messages)

    def _use_static_attention(self, run: Run, model: Model, selection: Selection) -> None:
        """Let plain torch fill the attention cores that a default kernel would fill with caches that grow.

        The config names a default kernel for training. A kernel that it names for attention stays.
        """
        if self._reason_against_static_modules(run, model):
            return
        kernels, messages = run.config.kernels, dict[str, None]()
        for number, filled in enumerate(selection.filled):
            plain = replace(filled, offer=None)
            is_default = filled.supplier in kernels.defaults and filled.site.kind not in kernels.kinds
            if is_default and _grows(filled, run, model) and not _grows(plain, run, model):
                selection.filled[number] = plain
                messages[f"{_lacks_static_keys(filled)}; plain torch computes it"] = None
        self.replaced += tuple(messages)

    def _refuse_divided(self, run: Run) -> None:
        """Raise UsageError if the layout divides the positions of a sample."""
        for axis in run.mesh.axes.values():
            refuse_axis(run, axis)

    def _refuse_parts(self, run: Run, model: Model) -> None:
        """Raise UsageError if the layout stores parts of weights."""
        for name, placement in model.placements.items():
            if placement.gathered_along:
                raise UsageError(
                    f"the layout '{run.config.parallel.layout}' stores parts of '{name}' that training gathers for "
                    f"each pass, and sampling gathers no weights; use a layout that divides the computation (tensor "
                    f"or expert parallelism)"
                )

    def _reason_against_static(self, run: Run, model: Model, selection: Selection) -> str:
        growing = (_lacks_static_keys(filled) for filled in selection.filled if _grows(filled, run, model))
        return self._reason_against_static_modules(run, model) or next(growing, "")

    def _reason_against_static_modules(self, run: Run, model: Model) -> str:
        if len(model.stages.units) > 1 and not self.steps_stages:
            return "the model is divided into the chunks of a pipeline"
        if (multiple := self.multiple(run)) > 1:
            return f"the layout divides the positions of a call among {multiple} ranks"
        for module in cached_modules(model):
            if not covers(type(module), STATIC) or getattr(module, STATIC) is not True:
                return f"'{type(module).__name__}' does not declare that it serves a static cache (`{STATIC}`)"
        return ""


def sampling_run(config: RunConfig, sampler: Sampler) -> Run:
    """The prepared run of a config, which samples instead of training."""
    run = prepare(config, {LABEL: sampler})
    run.trains = False
    processor: Processor | None = run.hooks.call.build_processor(config=config)
    if processor is not None:
        run.entries -= frozenset(processor.entries)
    if sampler.media:
        run.entries |= frozenset(processor_of(run).entries)
    return run


def processor_of(run: Run) -> Processor:
    """What makes the entries of media; UsageError if the model takes none."""
    processor: Processor | None = run.hooks.call.build_processor(config=run.config)
    if processor is None:
        raise UsageError(
            f"prompts have images, and the model of {listed(run.hooks.implementers('build_model'))} has no part that "
            f"sees them; use a model with a tower, or prompts without images"
        )
    return processor


def _refuse_unable(run: Run, model: Model) -> None:
    """Raise UsageError if the model cannot continue a text."""
    (owner,) = run.hooks.implementers("build_model")
    if reason := reason_against_text(model):
        raise UsageError(f"{owner} cannot continue a text token by token, because {reason}; sample from a decoder")


def reason_against_text(model: Model) -> str:
    """Why a model, as the hook `build_model` returns it, cannot continue a text, as a clause; empty if it can."""
    if not model.plan.inference:
        return "its plan has no inference units"
    return "its attention sees later tokens" if sees_later_tokens(_caching(model)) else ""


def sees_later_tokens(modules: Iterable[nn.Module]) -> bool:
    """Whether attention among `cached_modules` has later keys of its own text too, as in an encoder."""
    attending = (module for module in modules if any(slot.name == CORE for slot in slots_of(module)))
    specs = [spec for module in attending if (spec := getattr(module, "spec", None)) is not None]
    return any(not spec.causal and not spec.cross for spec in specs)


def _refuse_streams_in_text(run: Run, model: Model) -> None:
    """Raise UsageError if a unit computes tokens of text from a stream: what it received is gone after the prompt."""
    plan = model.plan
    made = {name for unit in plan.inference if unit.sequence in plan.streams for name in unit.outputs}
    once = made | plan.stream_entries
    for unit in plan.without_streams(plan.inference):
        if needed := once.intersection(unit.inputs):
            (owner,) = run.hooks.implementers("build_model")
            raise UsageError(
                f"the unit '{unit.name}' of {owner} needs {listed(map(repr, sorted(needed)))} for every token, and "
                f"sampling computes streams once, with the prompt; use prompts without images"
            )


def refuse_stages(run: Run, model: Model) -> None:
    """Raise UsageError if stages cannot run forward."""
    axis = run.mesh.axes.get(model.stages.axis)
    if axis is not None and axis.size > 1 and (model.pipeline is None or model.pipeline.relay is None):
        raise UsageError(
            f"{owners_of_axes(run).get(axis.name, 'the layout')} divides the model into stages "
            f"({axis.name}={axis.size}), and does not run them forward for sampling (Pipeline.relay); use a "
            f"layout without it, such as tensor parallelism"
        )


def refuse_axis(run: Run, axis: Axis) -> None:
    """Raise UsageError if an axis of the mesh divides samples."""
    divided = sorted({*axis.entries} - {"batch"})
    if axis.size > 1 and divided:
        raise UsageError(
            f"{owners_of_axes(run).get(axis.name, 'the layout')} divides the {listed(divided)} of a sample "
            f"({axis.name}={axis.size}), which grows token by token; use a layout without it"
        )


def owners_of_axes(run: Run) -> dict[str, str]:
    """The label of the strategy of each mesh axis."""
    return {axis.name: label for label, axes in run.hooks.each("mesh_axes", config=run.config) for axis in axes}


def multiple_of_positions(mesh: Mesh, undivided: Collection[str]) -> int:
    """The number that must divide the positions of a call, because ranks divide these among themselves.

    They do so inside the model (sequence parallelism) along axes that are not in `undivided`. Ranks with copies of the
    same tokens do so before experts in a mesh view of their own.
    """
    inside = [axis for axis in mesh.views["dense"] if not axis.entries and len(axis.views) == 1]  # no stages
    of_experts = len(mesh.views) > 1
    return math.prod(
        axis.size for axis in inside if (axis.name not in undivided if axis.divides("sequence") else of_experts)
    )


def cached_modules(model: Model) -> Iterator[Any]:
    """The modules of this rank that keep a cache, in order."""
    return _caching(model, {unit.name for unit in model.own_units})


def _caching(model: Model, own: set[str] | None = None) -> Iterator[Any]:
    """The modules with a slot that keeps a cache, of the inference units of tokens, or of those in `own` units."""
    for unit in model.plan.without_streams(model.plan.inference):
        if own is not None and own.isdisjoint((unit.name, *modules_around(unit.name))):
            continue
        for module in model.module.get_submodule(unit.name).modules():
            if _keeps_cache(module):
                yield module


def _keeps_cache(module: nn.Module) -> bool:
    return any(slot.name in (CORE, *STATEFUL) for slot in slots_of(module))


def _keeps_state(module: nn.Module) -> bool:
    """Whether a module's slot passes a state from position to position, which a cache can hold."""
    return any(slot.name in STATEFUL for slot in slots_of(module)) and getattr(module, NAME, False) is True


def _reason_against(model: Model) -> str:
    """Why a model cannot sample with a cache, as a clause; empty if it can."""
    for statement in statements(model):
        if statement.axes is None:
            return f"no declaration states what {statement.label} mixes (`mixes`)"
        of_stream = statement.sequence in model.plan.streams  # a stream is computed once, and as a whole
        module: Any = statement.module
        only_samples = of_stream or _keeps_state(module)
        if mixed := sorted(statement.axes & ({"batch"} if only_samples else {"sequence", "batch"})):
            return f"{statement.label} mixes the {listed(mixed)}"
        if of_stream or not _keeps_cache(module):
            continue
        if not covers(type(module), NAME) or module.caches is not True:
            return f"{statement.label} does not declare that it serves a cache (`{NAME}`)"
        if missing := [name for name in PROTOCOL if not hasattr(module, name)]:
            raise UsageError(f"{statement.label} declares `{NAME}`, and lacks {listed(missing)}")
    return ""


def _grows(filled: Filled, run: Run, model: Model) -> bool:
    """Whether a site is an attention core of tokens whose content does not serve a static cache."""
    if filled.site.slot != CORE or filled.site.sequence in model.plan.streams:
        return False
    site = replace(filled.site, needs=filled.site.needs | {STATIC_KEYS})
    offered = filled.offer is not None or not site.lacking(offered_in_plain_torch(site))
    answers = [one.answer(site, run) for one in (filled.offer, *filled.wraps) if one is not None]
    return not offered or not all(answer is True for answer in answers)


def _lacks_static_keys(filled: Filled) -> str:
    return f"{filled.supplier} does not offer '{STATIC_KEYS}' for {CORE} of '{filled.site.role}'"
