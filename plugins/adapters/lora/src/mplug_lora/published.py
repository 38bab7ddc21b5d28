"""The files of PEFT: adapter_config.json, and the names of the tensors of adapter_model.safetensors."""

from collections.abc import Iterable, Mapping
from typing import Any

from mplug import ExternalMap, ExternalNames, Factor, Fused
from mplug_lora.targets import Target

PREFIX = "base_model.model."


def names_of(targets: Iterable[Target], rank: int, dora: bool) -> ExternalNames | None:
    """Where PEFT keeps the parameters of the adapters; None if a target has no module in published checkpoints."""
    found: dict[str, Any] = {}
    targets = list(targets)
    for target in targets:
        if any(target.pairs[number].public is None for number in target.chosen):
            return None
        found |= _of_experts(target, targets, rank) if target.is_experts else _of_linear(target, dora)
    return ExternalNames(found)


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
    name = f"{target.name}_adapter"
    return {
        f"{name}.a": (ExternalMap(((e,), (r,), (i,)), f"{module}.lora_A.weight", ((e, r), (i,))),),
        f"{name}.b": (ExternalMap(((e,), (o,), (r,)), f"{module}.lora_B.weight", ((o,), (r, e))),),
    }


def _outside(other: Target, target: Target) -> bool:
    """Whether PEFT's adapter of `other` wraps that of `target`: the later parameter of a module is the outer one."""
    return (target.name, other.name) == (target.name, f"{target.name.rpartition('.')[0]}.down") and other != target


def config_of(targets: Iterable[Target], config: Any, base: str | None) -> Mapping[str, Any]:
    """adapter_config.json. The target modules are the last parts of their names if no other module has one of them."""
    targets = list(targets)
    linears = [target for target in targets if not target.is_experts]
    pairs = [target.pairs[number] for target in linears for number in target.chosen]
    parameters = sorted({".".join(str(t.pairs[0].public).split(".")[-3:]) for t in targets if t.is_experts})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rank_stabilized,
        "use_dora": config.dora,
        "bias": "none",
        "fan_in_fan_out": any(pair.transposed for pair in pairs),
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": sorted({str(pair.public) for pair in pairs}),
        "target_parameters": parameters or None,
    }
