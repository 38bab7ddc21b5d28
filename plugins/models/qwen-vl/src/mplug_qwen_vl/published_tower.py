"""The mapping `vision_config` in the config.json of Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE. No torch."""

from collections.abc import Mapping
from math import isqrt
from typing import TYPE_CHECKING, Any

from mplug_nn import (
    SHARED_FIELDS,
    PublicField,
    PublicForm,
    ReadField,
    UnusedField,
    Values,
    activation_field,
)

if TYPE_CHECKING:
    from mplug_qwen_vl.vision import VisionConfig

PLAIN = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu"}
"""The library's activation of an MLP without a gate -> vision.activation."""
SIZE = Values.integer()


def _tower_fields(hidden: int, ffn: int, layers: int, patch: int) -> dict[str, PublicField]:
    return {
        **SHARED_FIELDS,
        "depth": ReadField(layers, Values.integer(most=10_000), ("num_layers",)),
        "hidden_size": ReadField(hidden, SIZE, ("hidden_size",)),
        "intermediate_size": ReadField(ffn, SIZE, ("ffn_hidden_size",)),
        "num_heads": ReadField(16, SIZE, ("num_attention_heads",)),
        "in_channels": ReadField(3, SIZE, ("channels",)),
        "patch_size": ReadField(patch, SIZE, ("patch_size",)),
        "spatial_merge_size": ReadField(2, SIZE, ("merge_size",)),
        "temporal_patch_size": ReadField(2, SIZE, ("patch_frames",)),
        "out_hidden_size": ReadField(3584, SIZE),
        "initializer_range": ReadField(0.02, Values.not_negative(), ("init_std",)),
        "rope_parameters": ReadField(None, Values.mapping().or_null),
        "rope_theta": ReadField(10000.0, Values.positive()),
        "in_chans": UnusedField("the library reads 'in_channels'"),
        "spatial_patch_size": UnusedField("the library reads 'patch_size'"),
        "embed_dim": UnusedField("the library reads 'hidden_size'"),
    }


ALIASES = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}


def _axial(values: Mapping[str, Any]) -> dict[str, Any]:
    """The base of the rotary frequencies."""
    given = values["rope_parameters"] or {}
    unknown = sorted(set(given) - {"rope_type", "type", "rope_theta"})
    kind = given.get("rope_type", given.get("type", "default"))
    if unknown or kind not in ("default", "axial"):
        raise ValueError(f"its field 'rope_parameters' has {unknown or repr(kind)}, and the family supports axial ones")
    theta = given.get("rope_theta", values["rope_theta"])
    if not Values.positive().accepts(theta):
        raise ValueError("its field 'rope_parameters.rope_theta' must be a number above 0")
    return {"rope_theta": theta}


def _written_tower(config: "VisionConfig") -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "axial", "rope_theta": config.rope_theta}}


def _second_tower(values: Mapping[str, Any]) -> dict[str, Any]:
    whole = tuple(sorted(number for number in set(values["fullatt_block_indexes"]) if number < values["depth"]))
    return {**_axial(values), "full_attention_blocks": whole}


def _written_second_tower(config: "VisionConfig") -> dict[str, Any]:
    return {**_written_tower(config), "fullatt_block_indexes": list(config.full_attention_blocks)}


SECOND_TOWER = PublicForm(
    architecture="",
    model_type="qwen2_5_vl_vision",
    fields={
        **_tower_fields(3584, 3420, 32, 14),
        **activation_field("hidden_act", "silu"),
        "tokens_per_second": ReadField(4, SIZE, ("tokens_per_second",)),
        "window_size": ReadField(112, SIZE, ("window_size",)),
        "fullatt_block_indexes": ReadField([7, 15, 23, 31], Values.indices()),
    },
    aliases=ALIASES,
    settings=_second_tower,
    write=_written_second_tower,
    implied={
        "norm": "rmsnorm",
        "norm_bias": False,
        "norm_eps": 1e-6,
        "patch_bias": False,
        "position_grid": None,
        "deepstack_blocks": (),
    },
)
"""The tower of Qwen2.5-VL."""


def _third_tower(values: Mapping[str, Any]) -> dict[str, Any]:
    number = values["num_position_embeddings"]
    if isqrt(number) ** 2 != number:
        raise ValueError(f"its field 'num_position_embeddings' is {number}, which is not a square")
    return {
        **_axial(values),
        "position_grid": isqrt(number),
        "deepstack_blocks": tuple(values["deepstack_visual_indexes"]),
    }


def _written_third_tower(config: "VisionConfig") -> dict[str, Any]:
    return {
        **_written_tower(config),
        "num_position_embeddings": (config.position_grid or 0) ** 2,
        "deepstack_visual_indexes": list(config.deepstack_blocks),
    }


def third_tower_form(model_type: str) -> PublicForm:
    """The tower of Qwen3-VL, as its dense or its sparse models name it."""
    return PublicForm(
        architecture="",
        model_type=model_type,
        fields={
            **_tower_fields(1152, 4304, 27, 16),
            "hidden_act": ReadField("gelu_pytorch_tanh", Values.one_of(*PLAIN), ("activation",), PLAIN),
            "num_position_embeddings": ReadField(2304, SIZE),
            "deepstack_visual_indexes": ReadField([8, 16, 24], Values.indices()),
        },
        aliases=ALIASES,
        settings=_third_tower,
        write=_written_third_tower,
        implied={
            "norm": "layernorm",
            "norm_bias": True,
            "norm_eps": 1e-6,
            "patch_bias": True,
            "window_size": None,
            "full_attention_blocks": (),
            "tokens_per_second": None,
        },
    )
