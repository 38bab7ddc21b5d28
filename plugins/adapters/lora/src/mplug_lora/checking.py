"""Compares a folder of PEFT, with which a run begins, with the adapters of the run: each field and each layer."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mplug_lora.fields import FILE, WEIGHTS, refuse_unsupported, value_of, without_scores
from mplug_lora.matching import ALL_LINEAR, matched_modules, matched_parameters, of_pattern

SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/([^/]+)$")
"""The end of a path in the cache of the Hugging Face Hub."""


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Names of the projections of experts that PEFT rewrites."""


@dataclass(frozen=True)
class Layers:
    """Layers of the base model, by their names in the transformers library.

    `modules` are all modules with weights, `linears` those linears that can have adapters, and `experts` the stacked
    parameters of experts. `chosen` are the linears and parameters of experts that have adapters in the run.
    """

    modules: frozenset[str]
    linears: frozenset[str]
    experts: frozenset[str]
    chosen: frozenset[str]

    def is_taken_for_experts(self, name: str) -> bool:
        """Whether PEFT takes a linear, a dense layer or that of a shared expert, for a projection of experts.

        PEFT rewrites `target_modules` for the library's stacked experts by the last part of each name alone. It does
        not rewrite `target_parameters`.
        """
        return bool(self.experts) and name in self.linears and name.rpartition(".")[2] in PROJECTIONS


def checker(
    layers: Layers, config: Any, base: str | None, prefix: str, *, has_scores: bool = False
) -> Callable[..., None]:
    """A function that compares a folder with the run: `Adapters.check`. `base` is the folder of the base model.

    With `has_scores`, the run trains a head of scores, which the folder may have too.
    """
    check = partial(_check, layers, config, base, prefix)
    return partial(_check_with_scores, check) if has_scores else check


def _check_with_scores(check: Callable[..., None], fields: Mapping[str, Any], tensors: Collection[str]) -> None:
    check(without_scores(fields), tensors)


def _check(
    layers: Layers, config: Any, base: str | None, prefix: str, fields: Mapping[str, Any], tensors: Collection[str]
) -> None:
    """Raise ValueError, with one sentence, unless PEFT computes with the folder what the run computes."""
    refuse_unsupported(fields)
    _refuse_another_base(fields, base, config.base)
    for name, setting in (("use_rslora", "rank_stabilized"), ("use_dora", "dora")):
        own = getattr(config, setting)
        if bool(value_of(fields, name)) != own or not isinstance(value_of(fields, name), bool | None):
            raise ValueError(
                f"have {name}={value_of(fields, name)!r} in {FILE}, and the run has {own}; {_use_folders(setting)}"
            )
    keys = adapted(fields, layers)
    for name in sorted(layers.chosen & keys.keys()):
        _refuse_another_scale(fields, config, name, keys[name])
    for name in sorted(keys.keys() - layers.chosen):
        raise ValueError(_beyond_run(name, layers, _has_tensors(name, layers, prefix, tensors)))
    for name in sorted(layers.chosen - keys.keys()):
        raise ValueError(_beyond_folder(name, _has_tensors(name, layers, prefix, tensors)))


def _use_folders(setting: str) -> str:
    return f"use the settings of the folder (adapters.lora.{setting})"


def adapted(fields: Mapping[str, Any], layers: Layers) -> dict[str, str]:
    """The layers that PEFT adapts, each with the name by which PEFT finds its rank and alpha. May raise ValueError."""
    wanted = value_of(fields, "target_modules")
    if isinstance(wanted, str) and wanted.lower() == ALL_LINEAR and layers.experts:
        raise ValueError(
            f"have target_modules={wanted!r} in {FILE}, which means other layers of a model with experts in each "
            f"version of PEFT; write the names of the adapted modules into the file"
        )
    found = {name: name for name in matched_modules(fields, layers.modules, layers.linears)}
    for name in filter(layers.is_taken_for_experts, sorted(found)):
        raise ValueError(
            f"adapt '{name}' by target_modules in {FILE}, which PEFT takes for a projection of experts, so it would "
            f"ignore its tensors; write '{name}.weight' into target_parameters instead"
        )
    weights = {f"{name}.weight": name for name in layers.modules}
    for parameter in matched_parameters(fields, [*layers.experts, *weights]):
        found[weights.get(parameter, parameter)] = parameter
    return found


def _refuse_another_scale(fields: Mapping[str, Any], config: Any, name: str, key: str) -> None:
    settings = (("r", "rank_pattern", "rank"), ("lora_alpha", "alpha_pattern", "alpha"))
    for plain, patterns, setting in settings:
        own = getattr(config, setting)
        value = of_pattern(fields, patterns, plain, key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != own:
            of = f" of '{name}' ({patterns})" if value != value_of(fields, plain) else ""
            raise ValueError(f"have {plain}={value!r}{of} in {FILE}, and the run has {own:g}; {_use_folders(setting)}")


def _beyond_run(name: str, layers: Layers, has_tensors: bool) -> str:
    if not has_tensors:
        return (
            f"are incomplete: by {FILE} (target_modules, target_parameters), PEFT adapts '{name}', and {WEIGHTS} has "
            f"no tensors for it; remove the name from the file, or use a complete folder"
        )
    if name in layers.linears | layers.experts:
        return f"adapt '{name}', and the run does not; add it to adapters.lora.targets"
    return f"adapt '{name}', which mplug does not; use adapters of the linears and experts of the blocks alone"


def _beyond_folder(name: str, has_tensors: bool) -> str:
    if not has_tensors:
        return f"do not adapt '{name}', and the run does; leave it out of adapters.lora.targets"
    return (
        f"contradict themselves: {WEIGHTS} has tensors for '{name}', and {FILE} (target_modules, exclude_modules, "
        f"layers_to_transform, target_parameters) leaves it out, so PEFT would ignore them; correct the file"
    )


def _has_tensors(name: str, layers: Layers, prefix: str, tensors: Iterable[str]) -> bool:
    module = name.rpartition(".")[0] if name in layers.experts else name
    return any(tensor.startswith((f"{prefix}{module}.lora_", f"{prefix}{module}.base_layer.")) for tensor in tensors)


def _refuse_another_base(fields: Mapping[str, Any], base: str | None, stated: str | None) -> None:
    name, revision = value_of(fields, "base_model_name_or_path") or "", value_of(fields, "revision")
    for field, value in (("base_model_name_or_path", name), ("revision", revision or "")):
        if not isinstance(value, str):
            raise ValueError(f"have {field}={value!r} in {FILE}, which is no text; correct the file")
    whole = named_base(name, revision)
    if whole in ("", stated) or (base is not None and _is_base(name, revision, base)):
        return
    begins = "random weights" if base is None else f"'{base}'"
    raise ValueError(
        f"were trained on the base model '{whole}' (base_model_name_or_path in {FILE}), and the run begins with "
        f"{begins}; use that model (--pretrained) or, if both are the same model, set adapters.lora.base='{whole}'"
    )


def named_base(name: str, revision: str | None) -> str:
    """The base model in one word: its name or, if it is a version other than the main one, NAME@REVISION."""
    return f"{name}@{revision}" if revision not in (None, "", "main") else name


def _is_base(name: str, revision: str | None, base: str) -> bool:
    """Whether a folder is the base model of a name: by its path, by the Hub's cache, or as '.../ORGANISATION/MODEL'."""
    folder = Path(base).expanduser()
    snapshot = SNAPSHOT.search(folder.as_posix())
    if snapshot is not None and snapshot[1] == name.replace("/", "--"):
        return revision in (None, "", "main", snapshot[2])
    if named_base(name, revision) != name:
        return False
    of_hub = name.count("/") == 1 and folder.parts[-2:] == tuple(name.split("/"))
    return of_hub or name == base or Path(name).expanduser().resolve() == folder.resolve()
