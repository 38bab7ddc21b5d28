"""A decoder beside a narrower base model: maximal update parametrization (μP, arXiv 2203.03466; arXiv 2310.17813)."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import TYPE_CHECKING

from torch import Tensor, nn

from mplug.errors import UsageError
from mplug.layout.names import compiled
from mplug.layout.plan import Init, Parameter
from mplug.layout.widths import Widths
from mplug_nn.decoders.parts import (
    AttentionConfig,
    BlockConfig,
    ExpertsConfig,
    LatentAttentionConfig,
    MLPConfig,
    PartConfig,
)
from mplug_nn.embedding import Embedding
from mplug_nn.head import Head

if TYPE_CHECKING:
    from mplug_nn.decoders.config import DecoderConfig

FIELD = "model.mup_base"


def blocks_beside(config: "DecoderConfig", base: "DecoderConfig", ahead: bool = False) -> tuple[PartConfig, ...]:
    """The blocks of a config, with attention scores that fall with the width of a head over that of the base model.

    1 / head_dim instead of 1 / sqrt(head_dim), equal at the width of the base model.
    """
    own, others = (one.blocks_ahead if ahead else one.blocks for one in (config, base))
    if len(own) != len(others):
        raise UsageError(f"{FIELD} describes a model with {len(others)} blocks beside {len(own)}; name only widths")
    return tuple(_beside(block, other) for block, other in zip(own, others, strict=True))


def _beside(part: PartConfig, base: PartConfig) -> PartConfig:
    match part, base:
        case BlockConfig(), BlockConfig():
            _beside(part.feed_forward, base.feed_forward)
            return replace(part, attention=_beside(part.attention, base.attention))
        case AttentionConfig(), AttentionConfig():
            return replace(part, scale=_scale(part.head_dim, base.head_dim, base.scale))
        case LatentAttentionConfig(), LatentAttentionConfig():
            width, of_base = (one.key_width + one.rotary_width for one in (part, base))
            return replace(part, scale=_scale(width, of_base, base.scale))
        case (MLPConfig(), MLPConfig()) | (ExpertsConfig(), ExpertsConfig()):
            return part
    raise UsageError(
        f"{FIELD}: it is not known how {type(part).__name__} scales with its width; use blocks of attention with an "
        f"MLP or experts, or remove the field"
    )


def _scale(width: int, of_base: int, scale: float | None) -> float:
    return (of_base**-0.5 if scale is None else scale) * of_base / width


def parameters_beside(parameters: Mapping[str, Parameter], module: nn.Module, base: nn.Module) -> dict[str, Parameter]:
    """The parameters of a plan with their `widths`, and with the initial values that these call for.

    The standard deviation of a matrix is that of the base model times s / s_base with
    s = min(1, sqrt(outputs / inputs)) / sqrt(inputs) (arXiv 2310.17813, section 3); tables keep theirs.
    """
    own, others = (dict(one.named_parameters()) for one in (module, base))
    if own.keys() != others.keys():
        differing = min({*own} ^ {*others})
        raise UsageError(f"{FIELD} describes a model with other parameters ('{differing}'); name only widths")
    tables = {id(one) for one in _tables(module)}
    found = {}
    for pattern, parameter in parameters.items():
        regex = compiled(pattern)
        kinds = defaultdict[tuple[Widths, float], list[str]](list)
        for name in filter(regex.fullmatch, own):
            is_vector = parameter.init.kind == "constant" or id(own[name]) in tables  # also stacks of biases
            kinds[_widths(own[name].shape, others[name].shape, is_vector)].append(name)
        if len(kinds) > 1:
            raise UsageError(f"{FIELD}: the parameters '{pattern}' have several widths; use equal blocks")
        ((widths, factor),) = kinds
        found[pattern] = replace(parameter, widths=widths, init=_scaled(parameter.init, factor))
    return found


def _tables(module: nn.Module) -> list[Tensor]:
    """The tables of tokens and positions, and of the output head, whose logits are divided by the ratio of widths."""
    found: list[Tensor] = []
    for part in module.modules():
        if isinstance(part, Embedding):
            found.append(part.weight)
        elif isinstance(part, Head):
            found.append(part.project.weight)
    return found


def _widths(own: Sequence[int], base: Sequence[int], is_vector: bool) -> tuple[Widths, float]:
    """The widths of a parameter by its shapes, and the factor on the standard deviation of its initial values."""
    if is_vector or len(own) == 1:
        return Widths(own[-1] / base[-1]), 1.0
    (rows, columns), (of_base, inputs) = own[-2:], base[-2:]
    return Widths(rows / of_base, columns / inputs), _size(rows, columns) / _size(of_base, inputs)


def _size(outputs: int, inputs: int) -> float:
    return min(1.0, sqrt(outputs / inputs)) / sqrt(inputs)


def _scaled(init: Init, factor: float) -> Init:
    if init.kind != "normal" or factor == 1:
        return init
    return replace(init, std=init.std * factor, segment_stds=tuple(std * factor for std in init.segment_stds))
