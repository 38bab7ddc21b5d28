"""Attaches the adapters to a model."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mplug import Model, Run, UsageError
from mplug_lora.checking import checker
from mplug_lora.merging import merge_of, norms_of
from mplug_lora.modules import ExpertsLowRank, LowRank
from mplug_lora.published import (
    PREFIX,
    config_of,
    config_with_scores,
    layers_of,
    names_of,
    names_with_scores,
    task_type_of,
    unpublished,
)
from mplug_lora.targets import Target, candidates_of, chosen_targets
from mplug_pretrained import Adapters, ScoreHead

if TYPE_CHECKING:
    from torch import nn


def adapt(model: Model, config: Any, scale: float, base: str | None) -> None:
    """Attach an adapter to every target, and freeze all other parameters of the model.

    Raises UsageError for targets that the model does not have, and for a rank above the width of a target.
    """
    candidates = candidates_of(model)
    targets = chosen_targets(candidates, config.targets)
    if config.experts == "shared" and not any(target.is_experts for target in targets):
        raise UsageError(
            "adapters.lora.experts=shared: adapters.lora.targets names no experts of this model; add 'experts' to "
            "adapters.lora.targets, or unset adapters.lora.experts"
        )
    for target in targets:
        _refuse_wide_rank(target, config.rank)
        if target.is_experts and (config.dropout or config.dora):
            wrong = "dropout" if config.dropout else "dora"
            raise UsageError(
                f"adapters.lora.{wrong} does not apply to the adapters of experts: their rows are in the order of "
                f"experts, and no norms of their weights are computed; leave 'experts' out of adapters.lora.targets, "
                f"or unset adapters.lora.{wrong}"
            )
    model.freeze(list(model.parameters()))
    modules = {_place(target): _module(target, config, scale) for target in targets}
    model.attach(modules)
    roles = dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in modules)
    model.plan = replace(model.plan, base_modules=(*model.plan.base_modules, *roles))
    model.merges |= {one.weight: merge_of(one, config.rank, scale, config.dora) for one in targets}
    layers = layers_of(model, candidates, targets)
    reason = unpublished(targets, layers, config)
    offsets = {
        f"{_place(one)}.magnitude{number}": norms_of(one, number)
        for one in targets
        for number in (one.chosen if config.dora else ())
    }
    alone = Adapters(
        "peft",
        None if reason else names_of(targets, config.rank, config.dora),
        config_of(targets, layers, config, base, task_type_of(model)),
        offsets,
        None if config.path is None else Path(config.path).expanduser(),
        reason,
        checker(layers, config, base, PREFIX),
    )
    check = checker(layers, config, base, PREFIX, has_scores=True)
    model.adapters = replace(alone, scored=partial(_scored, alone, check))


def _scored(adapters: Adapters, check: Callable[..., None], head: ScoreHead) -> Adapters:
    """The form of adapters with a head of scores, which PEFT trains as a whole."""
    names = None if adapters.names is None else names_with_scores(adapters.names, head)
    return replace(adapters, names=names, config=config_with_scores(adapters.config), check=check, scored=None)


def _refuse_wide_rank(target: Target, rank: int) -> None:
    for number in target.chosen:
        width = min(target.shape[-1], target.pairs[number].length)
        if rank > width:
            of = target.pairs[number].public or target.name
            raise UsageError(
                f"adapters.lora.rank={rank} is above the width {width} of '{of}', so B A would have no lower rank than "
                f"the weight; set a rank of at most {width}, or leave the layer out of adapters.lora.targets"
            )


def _place(target: Target) -> str:
    """The name of the adapter of a target."""
    return f"{target.name}_adapter" if target.is_experts else f"{target.name}.adapter"


def _module(target: Target, config: Any, scale: float) -> "nn.Module":
    if target.is_experts:
        experts, outputs, inputs = target.dims
        count, rows, width = target.shape
        shared = config.experts == "shared"
        return ExpertsLowRank((experts, outputs, inputs), (count, rows, width), config.rank, scale, shared)
    return LowRank(
        target.dims[1], target.pairs, target.chosen, target.shape[1], config.rank, scale, config.dropout, config.dora
    )


def set_lengths(run: Run, model: Model) -> None:
    """Set the local lengths of the pairs of every adapter of this rank."""
    for name, module in model.attached.items():
        if isinstance(module, LowRank) and f"{name}.a.weight" in model.placements:
            weight = f"{name.removesuffix('.adapter')}.weight"
            held = model.placements[weight]
            cuts = model.placed(weight, held.parameter, held.shape, run.mesh).cuts[0]
            per_pair = [len(pair.rows) if isinstance(pair.rows, tuple) else 1 for pair in module.pairs]
            local = iter(cut.local_length for cut in cuts)
            module.lengths = tuple(sum(next(local) for _ in range(count)) for count in per_pair)
