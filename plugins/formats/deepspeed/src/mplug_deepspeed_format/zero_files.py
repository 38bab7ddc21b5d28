"""The tensors of one tensor-parallel rank of a checkpoint of DeepSpeed's engine, joined over data-parallel ranks.

Stages 1 and 2, and the bf16 optimizer without ZeRO: each optimizer file has flat partitions, one per group of
parameters, and says which range of them belongs to which parameter. Stage 3: each parameter is cut into equal flat
parts, the last one padded; a rank's parts of all parameters of a group are consecutive. Other weights, such as frozen
ones, are in the model files.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from mplug import UsageError
from mplug_deepspeed_format.pickles import load
from mplug_deepspeed_format.rank_files import RankFiles, refuse_absent
from mplug_deepspeed_format.saved import Saved, Shape

WEIGHT = "weight"
WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes of names that wrappers of a model add."""
EXPERTS = ("ds_zero_partition_groups", "ds_autoep_layers", "autoep_layers")
"""Keys of checkpoints whose experts are on several ranks."""


@dataclass(frozen=True)
class Content:
    """What one tensor-parallel rank has saved."""

    tensors: dict[str, Saved]
    facts: Mapping[str, Any]
    """The model file of its first rank, without the weights."""
    groups: tuple[Mapping[str, Any], ...]
    """The parameter groups of its optimizer: learning rate, betas and so on."""


def read_part(files: RankFiles, part: int, aliases: Mapping[str, str] | None = None) -> Content:
    """The tensors of a tensor-parallel rank. UsageError for absent files, and for partitions that do not fit.

    `aliases` maps further names of shared parameters to their first; only the files of part 0 have them.
    """
    models = {rank: load(path) for rank, path in sorted(files.model[part].items())}
    first, optimizers = models[min(models)], files.optimizer.get(part, {})
    if not optimizers and first.get("param_shapes") is not None:
        raise UsageError(
            f"'{files.path}' lacks the files '..._optim_states.pt', which have the fp32 weights of ZeRO; copy the "
            f"files of all ranks into one folder"
        )
    tensors, groups = dict[str, Saved](), tuple[Mapping[str, Any], ...]()
    if optimizers:
        saved = {rank: _optimizer(path) for rank, path in sorted(optimizers.items())}
        count = _count(saved[min(saved)])
        refuse_absent(optimizers, count)
        if files.sharded_model:
            refuse_absent(files.model[part], count)
        _refuse_experts(files.path, [*models.values(), *saved.values()])
        ordered = [saved[rank] for rank in range(count)]
        if "fp32_flat_groups" in ordered[0]:
            tensors = dict(_of_stage_3(ordered, first["param_shapes"]))
            groups = tuple(ordered[0]["optimizer_state_dict"]["param_groups"])
        else:
            tensors = dict(_of_stages_1_and_2(files.path, ordered, _shapes(first)))
            base = ordered[0]["base_optimizer_state"]
            groups = tuple(base["param_groups"]) if isinstance(base, dict) else ()
    tensors |= {name: one for name, one in rest(models).items() if name not in tensors}
    aliases = (first.get("shared_params") or {}) if aliases is None else aliases
    tensors |= {alias: tensors[name] for alias, name in aliases.items() if name in tensors}
    facts = {name: value for name, value in first.items() if name != "module"}
    return Content(_checked(files.path, tensors), facts, groups)


def unwrapped(names: list[str]) -> dict[str, str]:
    """For each name the name without the prefixes that all names have from wrappers of the model."""
    found = {name: name for name in names}
    while prefix := next((w for w in WRAPPERS if names and all(n.startswith(w) for n in found.values())), ""):
        found = {name: short.removeprefix(prefix) for name, short in found.items()}
    return found


def rest(models: Mapping[int, Mapping[str, Any]]) -> dict[str, Saved]:
    """The weights and buffers of model files: whole ones, and the frozen parameters that stage 3 has cut."""
    first, found = models[min(models)], dict[str, Saved]()
    placeholders = set(_shapes(first)) if len(models) > 1 or first.get("param_shapes") is not None else set()
    for name, tensor in (first.get("module") or {}).items():
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and name not in placeholders:
            found[name] = Saved(tuple(tensor.shape), {WEIGHT: [tensor.reshape(-1)]})
    for name, size in (first.get("frozen_param_shapes") or {}).items():
        shape = tuple(size)
        flats = [models[rank]["frozen_param_fragments"][name].reshape(-1) for rank in sorted(models)]
        found[name] = Saved(shape, {WEIGHT: _without_padding(flats, prod(shape))})
    return found


def _optimizer(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = load(path)["optimizer_state_dict"]
    return found


def _count(optimizer: Mapping[str, Any]) -> int:
    """The number of data-parallel ranks."""
    count = optimizer["partition_count"]
    return int(max(count)) if isinstance(count, list | tuple) else int(count)


def _shapes(model: Mapping[str, Any]) -> dict[str, Shape]:
    return {name: tuple(size) for group in model.get("param_shapes") or () for name, size in group.items()}


def _of_stages_1_and_2(
    path: Path, optimizers: Sequence[Mapping[str, Any]], shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, Saved]]:
    if "param_slice_mappings" not in optimizers[0]:
        raise UsageError(
            f"'{path}' was saved by an old version of DeepSpeed, which did not say where each parameter is; load and "
            f"save it with DeepSpeed 0.8 or later"
        )
    pieces, numbers = dict[str, dict[str, list[Tensor]]](), dict[str, dict[str, float]]()
    for optimizer in optimizers:
        for group, (flat, addresses) in enumerate(
            zip(optimizer["single_partition_of_fp32_groups"], optimizer["param_slice_mappings"], strict=True)
        ):
            state = _state_of_group(optimizer, group)
            for name, address in addresses.items():
                own = pieces.setdefault(name, {})
                for key, values in {WEIGHT: flat, **_moments(state, flat.numel())}.items():
                    own.setdefault(key, []).append(values.reshape(-1).narrow(0, address.start, address.numel))
                numbers.setdefault(name, {}).update(_numbers(optimizer, state))
    for name, own in pieces.items():
        yield name, Saved(shapes[name], own, numbers[name])


def _of_stage_3(
    optimizers: Sequence[Mapping[str, Any]], groups: list[Mapping[str, Any]]
) -> Iterator[tuple[str, Saved]]:
    ranks = len(optimizers)
    for group, sizes in enumerate(groups):
        flats = [optimizer["fp32_flat_groups"][group].reshape(-1) for optimizer in optimizers]
        needed = sum(-(-prod(size) // ranks) for size in sizes.values())
        if any(flat.numel() != needed for flat in flats):
            raise ValueError(
                f"group {group} has {[flat.numel() for flat in flats]} elements on its ranks, and its parameters need "
                f"{needed}"
            )
        states = [_state_of_group(optimizer, group) for optimizer in optimizers]
        kept = [_moments(state, needed) for state in states]
        keys = [key for key in kept[0] if all(key in own for own in kept)]
        begin = 0
        for name, size in sizes.items():
            numel, shape = prod(size), tuple(size)
            each = -(-numel // ranks)
            cut = {WEIGHT: [flat.narrow(0, begin, each) for flat in flats]}
            cut |= {key: [own[key].reshape(-1).narrow(0, begin, each) for own in kept] for key in keys}
            pieces = {key: _without_padding(parts, numel) for key, parts in cut.items()}
            yield name, Saved(shape, pieces, _numbers(optimizers[0], states[0]))
            begin += each


def _without_padding(pieces: list[Tensor], numel: int) -> list[Tensor]:
    """Flat pieces without the elements beyond the first `numel` of all."""
    found, left = list[Tensor](), numel
    for piece in pieces:
        found.append(piece[: max(left, 0)])
        left -= piece.numel()
    return found


def _state_of_group(optimizer: Mapping[str, Any], group: int) -> Mapping[str, Any]:
    """The state of the base optimizer for the flat partition of a group; empty if it has made no update."""
    base = optimizer["optimizer_state_dict" if "fp32_flat_groups" in optimizer else "base_optimizer_state"]
    if isinstance(base, list):  # an elastic checkpoint
        return dict(base[group])
    keys = [key for one in base["param_groups"] for key in one["params"]]
    return dict(base["state"].get(keys[group], {})) if group < len(keys) else {}


def _moments(state: Mapping[str, Any], numel: int) -> dict[str, Tensor]:
    """The states that have a value for each element. They may have the padding of the group, which follows them."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim() > 0 and value.numel() >= numel
    }


def _numbers(optimizer: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, float]:
    """The states that are numbers. Some optimizers count their steps in the group."""
    found = {
        key: float(value)
        for key, value in state.items()
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)
    }
    if "step" not in found and state:
        base = optimizer.get("base_optimizer_state") or optimizer.get("optimizer_state_dict") or {}
        groups = base["param_groups"] if isinstance(base, dict) else []
        step = next((one["step"] for one in groups if "step" in one), optimizer.get("base_optimizer_state_step"))
        found |= {} if step is None else {"step": float(step)}
    return found


def _refuse_experts(path: Path, contents: list[Mapping[str, Any]]) -> None:
    if any(one.get(key) for one in contents for key in EXPERTS):
        raise UsageError(
            f"'{path}' has experts on several ranks, which mplug cannot join; convert the checkpoint to a universal "
            f"one (python -m deepspeed.checkpoint.ds_to_universal), and import that"
        )


def _checked(path: Path, tensors: dict[str, Saved]) -> dict[str, Saved]:
    """The tensors by names without wrappers. UsageError if the pieces of one are not the whole tensor."""
    for name, one in tensors.items():
        if fault := one.fault():
            raise UsageError(f"the partitions in '{path}' have {fault}, of '{name}'; copy the files of one save again")
    names = unwrapped(list(tensors))
    return {names[name]: one for name, one in tensors.items()}
