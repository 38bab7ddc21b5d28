"""Why a CUDA graph cannot replay the steps of a run. A part of a step that does not state that it can is refused.

A step of training is the whole step. A command may also record a forward pass (`forward_obstacles`).
"""

from collections.abc import Collection, Iterable, Iterator

from mplug.config.sources import source_of
from mplug.errors import UsageError, listed
from mplug.model.model import Model
from mplug.run.run import Run
from mplug_products.weight_product import ProductModule
from mplug_steps.generator_seeds import drawing_plugin

HOOK = "captures"
IN_A_STEP = (
    "build_model",
    "adapt_model",
    "build_pipeline",
    "mesh_axes",
    "shard_model",
    "shard_states",
    "wrap_model",
    "build_optimizer",
)
"""Hooks whose results run in every step."""
IN_FORWARD = ("build_model", "adapt_model", "mesh_axes", "shard_model")
"""Hooks whose results run in every forward pass."""


def refuse_graphs(run: Run, model: Model) -> None:
    """Raise UsageError if a part of the steps of a run with `trainer.graphs` cannot be replayed."""
    found = step_obstacles(run, model)
    if found:
        source = source_of(run.config.settings, ("trainer", "graphs"))
        raise UsageError(
            f"trainer.graphs=true ({source}): a CUDA graph cannot replay the steps of this run, because "
            f"{', and because '.join(found)}; set trainer.graphs=false, or change these parts"
        )


def step_obstacles(run: Run, model: Model) -> list[str]:
    """The reasons, as clauses; empty if a graph can replay the steps."""
    if not run.device.startswith("cuda"):
        return ["the run is on the CPU"]
    hooks = ("build_stepper",) if model.pipeline is None else ("build_pipeline", "build_stepper")
    steppers = [
        f"{label} runs the step in an order of its own (the hook '{hook}')"
        for hook in hooks
        for label in run.hooks.implementers(hook)
    ]
    of_plugins = _of_plugins(run, model, IN_A_STEP)
    return [*steppers, *of_plugins, *_of_streams(model), *_of_draws(run, model), *_of_modules(run, model)]


def forward_obstacles(run: Run, model: Model, beside: Collection[str] = ()) -> list[str]:
    """The reasons, as clauses, why no graph can replay the parts of a forward pass; empty if one can.

    Plugins of the kinds `beside` have no part in the pass, though they have one in a step of training.
    """
    return [*_of_plugins(run, model, IN_FORWARD, beside), *_of_modules(run, model)]


def _of_streams(model: Model) -> list[str]:
    """Streams, whose number of rows a graph would fix."""
    return [f"the number of {axis} differs from micro batch to micro batch" for axis in model.plan.streams]


def _of_plugins(run: Run, model: Model, hooks: Iterable[str], beside: Collection[str] = ()) -> Iterator[str]:
    answers = dict(run.hooks.each(HOOK, run=run, model=model))
    groups = [group.optimizer for group in run.config.groups if group.optimizer] if "build_optimizer" in hooks else []
    for one in groups:
        answer = getattr(one.plugin, HOOK, None)
        answers[one.label] = one.call(HOOK, run=run, model=model) if callable(answer) else answer
    labels = (*_in_a_step(run, model, hooks), *(one.label for one in groups))
    parts = ((label, answers.get(label)) for label in labels if label.partition("/")[0] not in beside)
    for label, answer in dict.fromkeys((*parts, *_of_offers(model))):
        if answer is None:
            yield f"{label} does not state that its part of a step can be replayed (the hook '{HOOK}')"
        elif answer is not True:
            yield f"{label} {answer}" if isinstance(answer, str) else f"{label} answers '{HOOK}' with {answer!r}"


def _in_a_step(run: Run, model: Model, hooks: Iterable[str]) -> list[str]:
    """The labels of the plugins that take part in a step: by their hooks, or by what they supply or wrap."""
    by_hook = [label for hook in hooks for label in run.hooks.implementers(hook)]
    filled = [*model.slots, *model.unit_wraps]
    suppliers = [one.offer.plugin for one in filled if one.offer is not None and one.offer.captures is None]
    wraps = [wrap.plugin for one in filled for wrap in one.wraps]
    return [label for label in dict.fromkeys((*by_hook, *suppliers, *wraps)) if label in run.hooks.plugins]


def _of_offers(model: Model) -> Iterator[tuple[str, bool | str | None]]:
    """(plugin, answer) of selected suppliers that state it themselves (`Offer.captures`)."""
    offers = (one.offer for one in model.slots if one.offer is not None)
    return ((offer.plugin, offer.captures) for offer in offers if offer.captures is not None)


def _of_draws(run: Run, model: Model) -> Iterator[str]:
    drawing = drawing_plugin(run, model.slots)
    if drawing:
        yield (
            f"{drawing} draws dropout masks from torch's generator, which the host seeds for every unit (without "
            f"dropout, it draws none)"
        )


def _of_modules(run: Run, model: Model) -> Iterator[str]:
    """Defaults of slots in which the CPU waits for the device (`ProductModule.waits`)."""
    reasons = dict[str, list[str]]()
    for filled in model.slots:
        module = filled.site.module
        if filled.offer is None and isinstance(module, ProductModule):
            reason = module.waits(filled.site.slot, run.precision.activation_dtype)
            if reason:
                reasons.setdefault(reason, []).append(filled.site.role)
    for reason, roles in reasons.items():
        yield f"the CPU waits for the device in '{listed(dict.fromkeys(roles))}': {reason}"
