"""Compares attention from packed heads with plain torch in fp64, on the cases of `Attention.core`.

B batch, S sequence, H query heads, G KV heads, K head dim.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mplug_nn import AttentionInputs, AttentionSpec, PackedHeads, packed_heads_of
from mplug_testing.kernel_checks import Trial, strided

SLOT = "Attention.core"
UNKNOWN = "a bias that does not exist"
Joined = list[tuple[Tensor, Tensor]]
"""Packed heads that a call received, and copies from before the call."""


def is_served(trial: Trial) -> bool:
    """Whether the packed heads of the trial's supplier serve the case."""
    packed = packed_heads_of(trial.suppliers[SLOT])
    return packed is not None and packed.serves(_spec(trial))


def packed_fault(trial: Trial, factor: float) -> str:
    """A fault of the packed heads that serve a case: as a sentence, or the empty string."""
    packed, spec, inputs = packed_heads_of(trial.suppliers[SLOT]), _spec(trial), trial.case.inputs
    assert packed is not None
    trial = replace(trial, where=f"{trial.where}, from packed heads")
    if packed.serves(replace(spec, bias=UNKNOWN)):
        return f"{trial.where}: `serves` returns True for '{UNKNOWN}'; it must refuse needs that it does not know"
    if len({inputs[name].shape[:2] + inputs[name].shape[3:] for name in "qkv"}) > 1:
        return f"{trial.where}: `serves` returns True, although queries, keys and values have different shapes"
    for arranged, check in ((_unchanged, Trial.values_fault), (_strided, Trial.strided_fault)):
        seen: Joined = []
        if found := check(_joining(trial, packed, arranged, seen), factor):
            return found
        if not all(torch.equal(heads, before) for heads, before in seen):
            return f"{trial.where}: it changes its input 'packed heads' in place"
    return ""


def packed_compiled_fault(trial: Trial, factor: float) -> str:
    """A fault of the packed heads in a compiled call."""
    packed = packed_heads_of(trial.suppliers[SLOT])
    assert packed is not None
    trial = replace(trial, where=f"{trial.where}, from packed heads")
    return _joining(trial, packed, _unchanged, None).compiled_fault(factor)


def _spec(trial: Trial) -> AttentionSpec:
    spec: AttentionSpec = trial.case.module.spec  # type: ignore[assignment]
    return spec


def _joining(trial: Trial, packed: PackedHeads, arranged: Callable[[Tensor], Tensor], seen: Joined | None) -> Trial:
    """The trial of a core that packs its arguments and attends from packed heads."""

    def core(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, inputs: AttentionInputs) -> Tensor:
        heads = arranged(torch.cat((q, k, v), dim=2))  # [B, S, H + 2G, K]
        if seen is not None:
            seen.append((heads.detach(), heads.detach().clone()))
        return packed.attend(heads, q.shape[2], k.shape[2], spec, inputs)

    return replace(trial, suppliers={**trial.suppliers, SLOT: core})


def _unchanged(heads: Tensor) -> Tensor:
    return heads


def _strided(heads: Tensor) -> Tensor:
    return strided({"packed heads": heads})["packed heads"]
