"""The files of PEFT: adapter_config.json, and the names of the tensors of adapter_model.safetensors."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mplug import Model
from mplug_lora.checking import Layers
from mplug_lora.fields import SCORE, SCORED
from mplug_lora.targets import Target
from mplug_nn import AttentionSpec, TokensAhead
from mplug_pretrained import ExternalMap, ExternalNames, Factor, Fused, Interleaved, ScoreHead, Transposed

PREFIX = "base_model.model."


def names_of(targets: Iterable[Target], rank: int, dora: bool) -> ExternalNames:
    """Where PEFT keeps the parameters of the adapters. Every target has a module in published checkpoints."""
    found: dict[str, Any] = {}
    targets = list(targets)
    for target in targets:
        found |= _of_experts(target, targets, rank) if target.is_experts else _of_linear(target, dora)
    return ExternalNames(found)


def names_with_scores(names: ExternalNames, head: ScoreHead) -> ExternalNames:
    """The names of adapters, and that of the head of scores, which PEFT saves as a whole."""
    return ExternalNames({**names.tensors, head.weight: f"{PREFIX}{SCORE}.weight"}, scores=head)


def config_with_scores(fields: Mapping[str, Any]) -> dict[str, Any]:
    """adapter_config.json of adapters for a model of transformers with a head of scores."""
    return {**fields, "task_type": SCORED, "modules_to_save": [SCORE]}


def _of_linear(target: Target, dora: bool) -> dict[str, Any]:
    modules = {number: f"{PREFIX}{target.pairs[number].public}" for number in target.chosen}
    sources = [f"{module}.lora_A.weight" for module in modules.values()]
    name = f"{target.name}.adapter"
    found: dict[str, Any] = {f"{name}.a.weight": Fused(*sources) if len(sources) > 1 else sources[0]}
    for number, module in modules.items():
        found[f"{name}.b{number}.weight"] = f"{module}.lora_B.weight"
        if dora:
            found[f"{name}.magnitude{number}"] = f"{module}.lora_magnitude_vector"
    return found


def _of_experts(target: Target, targets: Iterable[Target], rank: int) -> dict[str, Any]:
    """PEFT has one A [E r, I] and one B [O, r E] for all experts, and nests the adapters of one module's parameters."""
    module, _, _ = f"{PREFIX}{target.pairs[0].public}".rpartition(".")
    outer = any(other.is_experts and _outside(other, target) for other in targets)
    module = f"{module}.base_layer" if outer else module
    experts, outputs, inputs = target.shape
    e, r, i, o = (Factor(label, size) for label, size in zip("erio", (experts, rank, inputs, outputs), strict=True))
    rows = [(o, o)]
    if target.pairs[0].interleaved:
        half = outputs // 2
        rows = [(Factor("o", outputs, half * n, half), Factor("o", outputs, n, half, 2)) for n in range(2)]
    name = f"{target.name}_adapter"
    return {
        f"{name}.a": (ExternalMap(((e,), (r,), (i,)), f"{module}.lora_A.weight", ((e, r), (i,))),),
        f"{name}.b": tuple(
            ExternalMap(((e,), (ours,), (r,)), f"{module}.lora_B.weight", ((theirs,), (r, e))) for ours, theirs in rows
        ),
    }


def _outside(other: Target, target: Target) -> bool:
    """Whether PEFT's adapter of `other` wraps that of `target`: the later parameter of a module is the outer one."""
    return (target.name, other.name) == (target.name, f"{target.name.rpartition('.')[0]}.down") and other != target


def unpublished(targets: Iterable[Target], layers: Layers, config: Any) -> str:
    """Why PEFT has no form of the adapters; empty if it has one."""
    if config.experts == "shared":
        return "PEFT has an A and a B for each expert, and adapters.lora.experts=shared has one for all experts"
    for target in targets:
        for number in target.chosen:
            public = target.pairs[number].public
            if public is None:
                return f"PEFT has no module for '{target.name}'; leave it out of adapters.lora.targets"
            if (config.dropout or config.dora) and not target.is_experts and layers.is_taken_for_experts(public):
                wrong = "dropout" if config.dropout else "dora"
                return (
                    f"PEFT takes '{public}' for a projection of experts, unless target_parameters names its weight, "
                    f"which excludes adapters.lora.{wrong}; unset it, or leave the layer out of adapters.lora.targets"
                )
    return ""


def layers_of(model: Model, candidates: Iterable[Target], targets: Iterable[Target]) -> Layers:
    """The layers of the published form of a model, and those with adapters."""
    found, linears, experts = set[str](), set[str](), set[str]()
    for target in candidates:
        publics = {pair.public for pair in target.pairs if pair.public is not None}
        (experts if target.is_experts else linears).update(publics)
    chosen = {str(target.pairs[number].public) for target in targets for number in target.chosen}
    ahead = tuple(f"{name}." for name, part in model.module.named_modules() if isinstance(part, TokensAhead))
    for name in model.parameters():
        if not name.startswith(ahead):  # the transformers library has no modules for multi-token prediction
            found.update(tensor.rpartition(".")[0] for tensor in _tensors(model, name))
    return Layers(frozenset(found), frozenset(linears), frozenset(experts), frozenset(chosen))


def _tensors(model: Model, name: str) -> list[str]:
    """The public tensors of a parameter; of a row of experts, those of the first."""
    external = model.plan.external.of(name) if model.plan.external is not None else None
    if external is None:
        return []
    parts: Iterable[Any] = external.sources if isinstance(external, Fused) else (external,)
    if isinstance(external, tuple):
        parts = [one.tensor for one in external]
    return [_tensor(part).replace("{}", "0") for part in parts]


def _tensor(source: Any) -> str:
    if isinstance(source, Interleaved):
        return _tensor(source.source)
    return source.tensor if isinstance(source, Transposed) else str(source)


def task_type_of(model: Model) -> str | None:
    """PEFT's word for what the model does; None for an encoder, because PEFT has none for masked tokens.

    PEFT requires of a causal model that it can generate, and of an encoder with a decoder that it takes both texts.
    """
    if model.plan.answering is not None:
        return "SEQ_2_SEQ_LM"
    of_tokens = [model.module.get_submodule(u.name) for u in model.plan.units if u.sequence not in model.plan.streams]
    specs = [getattr(part, "spec", None) for unit in of_tokens for part in unit.modules()]
    is_causal = all(spec.causal for spec in specs if isinstance(spec, AttentionSpec))
    return "CAUSAL_LM" if is_causal else None


def config_of(
    targets: Iterable[Target], layers: Layers, config: Any, base: str | None, task_type: str | None
) -> Mapping[str, Any]:
    """adapter_config.json. Targets have whole names, so no other layer is adapted by it."""
    targets = list(targets)
    linears = [target for target in targets if not target.is_experts]
    pairs = [target.pairs[number] for target in linears for number in target.chosen]
    modules = sorted({pair.public for pair in pairs if pair.public is not None})
    parameters = [f"{name}.weight" for name in modules if layers.is_taken_for_experts(name)]
    parameters += [str(target.pairs[0].public) for target in targets if target.is_experts]
    name, revision = _base_of(config, base)
    return {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": name,
        "revision": revision,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rank_stabilized,
        "use_dora": config.dora,
        "bias": "none",
        "fan_in_fan_out": any(pair.transposed for pair in pairs),
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": [name for name in modules if not layers.is_taken_for_experts(name)],
        "target_parameters": sorted(parameters) or None,
    }


def _base_of(config: Any, base: str | None) -> tuple[str | None, str | None]:
    """The name and the revision of the base model: those of `adapters.lora.base`, or the whole path of the folder."""
    if config.base:
        name, _, revision = config.base.partition("@")
        return name, revision or None
    folder = None if base is None else Path(base).expanduser()
    return (str(folder.absolute()) if folder is not None and folder.is_dir() else base), None
