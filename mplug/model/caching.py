"""Sampling with a cache: which models can, what their attention then computes, and which layouts sample.

A model samples with a cache if its modules declare enough:

- Every module declares what it mixes (`mplug.model.mixing`), and in evaluation none mixes positions or samples outside
  of slots. So the last positions can be computed alone, and several samples together.
- Every module with the slot `Attention.core` declares that it serves a cache:

      caches: ClassVar[bool] = True

  Then it has `serve_cache()`, `new_cache(size)` and an attribute `cache`, as `mplug_nn.DotProductAttention` has them.
  As for `mixes`, a declaration covers the code of its class and what the class inherits, not the code of subclasses.

Any other model samples one prompt at a time, and computes all its positions again for every token.

The caches are static (`mplug_nn.static_cache`) if all modules with this slot also declare

      static_cache: ClassVar[bool] = True

if all their cores offer 'static keys', if no pipeline divides the model, and if no ranks divide the positions of a call
among themselves. Otherwise the rows that a core receives grow with every token.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mplug_nn.specification import DOCUMENTS, STATIC_KEYS
from torch import nn

from mplug.errors import UsageError, listed
from mplug.layout.mesh import Mesh
from mplug.layout.names import modules_around
from mplug.model.mixing import covers, statements
from mplug.model.model import Model
from mplug.model.selection import Selection, offered_in_plain_torch
from mplug.run.run import Run
from mplug.slots import slots_of

NAME = "caches"
"""The attribute by which a class declares that its modules serve a cache."""
STATIC = "static_cache"
"""The attribute by which a class declares that its modules also serve a static cache."""
CORE = "Attention.core"
PROTOCOL = ("cache", "serve_cache", "new_cache")


def refuse_to_sample(run: Run, model: Model) -> None:
    """Raise UsageError if the model has no inference units, or if the layout cannot sample."""
    (owner,) = run.hooks.implementers("build_model")
    if not model.plan.inference:
        raise UsageError(f"the plan of {owner} has no inference units, so the model cannot be sampled from")
    owners = {axis.name: label for label, axes in run.hooks.each("mesh_axes", config=run.config) for axis in axes}
    for axis in run.mesh.axes.values():
        label, size = owners.get(axis.name, "the layout"), f"{axis.name}={axis.size}"
        divided = sorted({*axis.entries} - {"batch"})
        if axis.size > 1 and axis.name == model.stages.axis and not run.hooks.implementers("build_relay"):
            raise UsageError(
                f"{label} divides the model into stages ({size}), and does not run them forward for sampling (the hook "
                f"build_relay); use a layout without it, such as tensor parallelism"
            )
        if axis.size > 1 and divided:
            raise UsageError(
                f"{label} divides the {listed(divided)} of a sample ({size}), which grows token by token; use a layout "
                f"without it"
            )
    for name, placement in model.placements.items():
        if placement.gathered_along:
            raise UsageError(
                f"the layout '{run.config.parallel.layout}' stores parts of '{name}' that training gathers for each "
                f"pass, and sampling gathers no weights; use a layout that divides the computation (tensor or expert "
                f"parallelism)"
            )


def multiple_of_positions(mesh: Mesh) -> int:
    """The number that must divide the positions of a call, because ranks divide these among themselves.

    They do so inside the model (sequence parallelism), or before experts in a mesh view of their own.
    """
    inside = [axis for axis in mesh.views["attention"] if not axis.entries]
    divided = any(axis.divides("sequence") for axis in inside) or len(mesh.views) > 1
    return math.prod(axis.size for axis in inside) if divided else 1


def find_uncached(model: Model) -> None:
    """Set `model.uncached`. Call it while the model has the units of all stages: all ranks must agree."""
    model.module.eval()  # some modules mix samples in training only
    model.uncached = _reason_against(model)


def serve_caches(run: Run, model: Model) -> None:
    """Let the attention of a model serve caches from now on, unless it is `uncached`.

    Call it before offers are selected: a site's specification and its needs are those with a cache. Attention receives
    padding as a document of its own, so sites need documents if there may be padding.
    """
    if model.uncached:
        return
    for module in cached_modules(model):
        module.serve_cache()
    if run.decoding is not None and run.decoding.padded:
        run.entries |= {DOCUMENTS}


def cached_modules(model: Model) -> Iterator[Any]:
    """The modules of this rank that keep a cache, in order."""
    own = {unit.name for unit in model.own_units}
    for unit in model.plan.inference:
        if own.isdisjoint((unit.name, *modules_around(unit.name))):
            continue
        for module in model.module.get_submodule(unit.name).modules():
            if _attends(module):
                yield module


def _attends(module: nn.Module) -> bool:
    return any(slot.name == CORE for slot in slots_of(module))


def _reason_against(model: Model) -> str:
    """Why a model cannot sample with a cache, as a clause; empty if it can."""
    for statement in statements(model):
        if statement.axes is None:
            return f"no declaration states what {statement.label} mixes (`mixes`)"
        if mixed := sorted(statement.axes & {"sequence", "batch"}):
            return f"{statement.label} mixes the {listed(mixed)}"
        module: Any = statement.module
        if not _attends(module):
            continue
        if not covers(type(module), NAME) or module.caches is not True:
            return f"{statement.label} does not declare that it serves a cache (`{NAME}`)"
        if missing := [name for name in PROTOCOL if not hasattr(module, name)]:
            raise UsageError(f"{statement.label} declares `{NAME}`, and lacks {listed(missing)}")
    return ""


def use_plain_attention(model: Model, selection: Selection) -> None:
    """Let plain torch fill the attention cores that the config's kernel cannot compute with a cache.

    A kernel that trains a model need not serve keys from a cache. `model.replaced` has a message for each such role.
    """
    if model.uncached:
        return
    kept, messages = [], dict[str, None]()
    for unmet in selection.unmet:
        by_kernel = unmet.site.slot == CORE and unmet.plugin.startswith("kernels/")
        if by_kernel and not unmet.site.lacking(offered_in_plain_torch(unmet.site)):
            messages[f"{unmet}; plain torch computes it"] = None
        else:
            kept.append(unmet)
    selection.unmet = kept
    model.replaced = tuple(messages)


def choose_static_caches(run: Run, model: Model, selection: Selection) -> None:
    """Set `model.growing`: why the caches of a model are not static; empty if they are."""
    model.growing = model.uncached or _reason_against_static(run, model, selection)


def without_static_caches(model: Model) -> str:
    """Why no step of a token repeats the shapes of the one before, as a clause; empty if the caches are static."""
    if model.uncached:
        return f"the model has no cache, because {model.uncached}"
    return f"its caches grow, because {model.growing}" if model.growing else ""


def _reason_against_static(run: Run, model: Model, selection: Selection) -> str:
    if len(model.stages.units) > 1:
        return "the model is divided into the chunks of a pipeline"
    if (multiple := multiple_of_positions(run.mesh)) > 1:
        return f"the layout divides the positions of a call among {multiple} ranks"
    for module in cached_modules(model):
        if not covers(type(module), STATIC) or getattr(module, STATIC) is not True:
            return f"'{type(module).__name__}' does not declare that it serves a static cache (`{STATIC}`)"
    for filled in selection.filled:
        if filled.site.slot == CORE:
            site = replace(filled.site, needs=filled.site.needs | {STATIC_KEYS})
            offered = filled.offer is not None or not site.lacking(offered_in_plain_torch(site))
            answers = [one.answer(site, run) for one in (filled.offer, *filled.wraps) if one is not None]
            if not offered or not all(answer is True for answer in answers):
                return f"{filled.supplier} does not offer '{STATIC_KEYS}' for {CORE} of '{site.role}'"
    return ""
