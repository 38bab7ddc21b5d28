"""The config.json of Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE: fields beside, and in, two nested mappings. No torch."""

from collections import ChainMap
from collections.abc import Mapping
from math import isqrt
from typing import TYPE_CHECKING, Any

from mplug_nn import (
    EXPERTS_ALTERING,
    EXPERTS_TRAINING,
    ROUTER_LOSS_FIELDS,
    SHARED_FIELDS,
    FixedField,
    FormField,
    PublicField,
    PublicForm,
    ReadField,
    UnusedField,
    Values,
    activation_field,
    attention_types,
    decoder_fields,
    heads_fields,
    rotary_fields,
    rotary_settings,
    shortest,
    tied_fields,
    written_rotary,
)
from mplug_qwen_vl import preparation

if TYPE_CHECKING:
    from mplug_qwen_vl.config import QwenVLConfig
    from mplug_qwen_vl.vision import VisionConfig

TEXT, VISION = "text_config", "vision_config"
SECTIONS = {"contiguous": [16, 24, 24], "alternating": [24, 20, 20]}
"""The library's sections of a division, if a folder states none."""
PLAIN = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu"}
"""The library's activation of an MLP without a gate -> vision.activation."""
SIZE, TOKEN = Values.integer(), Values.integer(0)


# The decoder.


def _rotary(values: Mapping[str, Any], division: str) -> dict[str, Any]:
    """Rotary positions, their sections, and whether they alternate."""
    plain, sections = dict[str, Any](), None
    for name in ("rope_parameters", "rope_scaling"):
        given = values[name]
        if not given:
            continue
        found = given.get("mrope_section", SECTIONS[division])
        if not _is_sections(found) or (sections is not None and sections != found):
            raise ValueError(f"its field '{name}.mrope_section' is not a list of three integers of at least 1")
        sections = found
        alternates = given.get("mrope_interleaved", division == "alternating")
        if alternates is not (division == "alternating"):
            raise ValueError(f"its field '{name}.mrope_interleaved' is {alternates!r}, which the library ignores")
        plain[name] = _without_sections(given)
    return {
        **rotary_settings(ChainMap(plain, values)),  # type: ignore[arg-type]
        "rope_division": division,
        "rope_sections": tuple(sections or SECTIONS[division]),
    }


def _is_sections(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(type(one) is int and one > 0 for one in value)


def _without_sections(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of rotary positions without those of coordinates."""
    found = {name: value for name, value in given.items() if name not in ("mrope_section", "mrope_interleaved")}
    return {
        name: "default" if value == "mrope" and name in ("type", "rope_type") else value
        for name, value in found.items()
    }


def _written_rotary(config: "QwenVLConfig") -> dict[str, Any]:
    division, sections = str(config.rope_division), list(config.rope_sections)
    found = written_rotary(config.rope_theta, config.rope_scaling)
    options = {**found["rope_parameters"], "mrope_section": sections}
    options |= {"mrope_interleaved": True} if division == "alternating" else {}
    return {"rope_theta": config.rope_theta, "rope_scaling": options, "rope_parameters": options}


def _written_decoder(config: "QwenVLConfig") -> dict[str, Any]:
    return {**_written_rotary(config), "num_key_value_heads": config.kv_heads}


COPIES: dict[str, PublicField] = {
    name: UnusedField("older releases repeat it here; the field beside this mapping decides")
    for name in (
        *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id"),
        "max_pixels",
    )
}
"""Rows of tokens that older releases write into the decoder's mapping too."""
NO_WINDOWS: dict[str, PublicField] = {
    "use_sliding_window": FixedField(False, (False, None), "the family reads decoders of VL models without windows"),
    "sliding_window": UnusedField("use_sliding_window is false"),
    "max_window_layers": UnusedField("use_sliding_window is false"),
    "layer_types": ReadField(None, Values.names().or_null),
}


def _second_text(values: Mapping[str, Any]) -> dict[str, Any]:
    types = attention_types(values, ["full"])
    if types != ("full",):
        raise ValueError("its field 'layer_types' has blocks with windows, which the family does not read")
    return _rotary(values, "contiguous")


SECOND_TEXT = PublicForm(
    architecture="",
    model_type="qwen2_5_vl_text",
    fields={
        **decoder_fields(
            vocab_size=152064,
            hidden_size=8192,
            intermediate_size=29568,
            num_hidden_layers=80,
            num_attention_heads=64,
            max_position_embeddings=32768,
        ),
        **heads_fields(8, None, null=("num_key_value_heads",)),
        **rotary_fields(1e6),
        **NO_WINDOWS,
        **COPIES,
        "rms_norm_eps": ReadField(1e-5, Values.positive(), ("norm_eps",)),
        "head_dim": FixedField(None, (None,), "the library's layers ignore it"),
        "tie_word_embeddings": ReadField(False, Values.flag()),
    },
    settings=_second_text,
    write=_written_decoder,
    implied={"qk_norm": False, "qkv_bias": True, "attention_out_bias": False},
    training=EXPERTS_TRAINING,
    altering=EXPERTS_ALTERING,
    longest="max_position_embeddings",
)
"""The decoder of Qwen2.5-VL."""
THIRD: dict[str, PublicField] = {
    **rotary_fields(500000.0),
    **COPIES,
    "attention_bias": ReadField(False, Values.flag(), ("qkv_bias", "attention_out_bias")),
    "tie_word_embeddings": UnusedField("the field beside this mapping decides"),
}


def _third_text(values: Mapping[str, Any]) -> dict[str, Any]:
    return _rotary(values, "alternating")


def _written_third(config: "QwenVLConfig") -> dict[str, Any]:
    return {**_written_decoder(config), "head_dim": config.head_width}


THIRD_TEXT = PublicForm(
    architecture="",
    model_type="qwen3_vl_text",
    fields={
        **decoder_fields(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=22016,
            num_hidden_layers=32,
            num_attention_heads=32,
            max_position_embeddings=128000,
        ),
        **heads_fields(32, 128, null=("num_key_value_heads",)),
        **THIRD,
    },
    settings=_third_text,
    write=_written_third,
    implied={"qk_norm": True},
    training=EXPERTS_TRAINING,
    altering=EXPERTS_ALTERING,
    longest="max_position_embeddings",
)
"""The decoder of Qwen3-VL."""


def _refuse_square(width: int, hidden: int) -> None:
    """Raise ValueError if the library cannot tell from a tensor of experts whether it is transposed."""
    if hidden in (width, 2 * width):
        raise ValueError(
            f"its experts of width {width} are square matrices beside hidden_size={hidden}: the library guesses from "
            f"the shape whether a tensor is transposed"
        )


def _sparse_text(values: Mapping[str, Any]) -> dict[str, Any]:
    """The blocks with experts: every n-th, except some."""
    _refuse_square(values["moe_intermediate_size"], values["hidden_size"])
    step, dense = values["decoder_sparse_step"], values["mlp_only_layers"] or ()
    types = [
        "experts" if number not in dense and (number + 1) % step == 0 else "mlp"
        for number in range(values["num_hidden_layers"])
    ]
    return {
        **_rotary(values, "alternating"),
        "feed_forward_types": None if set(types) == {"experts"} else shortest(types),
    }


def _written_sparse(config: "QwenVLConfig") -> dict[str, Any]:
    dense = [number for number in range(config.num_layers) if not config.has_experts(number)]
    _refuse_square(config.expert_width, config.hidden_size)
    return {
        **_written_third(config),
        "moe_intermediate_size": config.expert_width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }


SPARSE_TEXT = PublicForm(
    architecture="",
    model_type="qwen3_vl_moe_text",
    fields={
        **decoder_fields(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=24,
            num_attention_heads=16,
            max_position_embeddings=128000,
        ),
        **heads_fields(16, None, null=("head_dim",)),
        **THIRD,
        **ROUTER_LOSS_FIELDS,
        "num_experts": ReadField(60, SIZE, ("num_experts",)),
        "num_experts_per_tok": ReadField(4, SIZE, ("num_experts_per_token",)),
        "moe_intermediate_size": ReadField(1408, SIZE, ("moe_ffn_hidden_size",)),
        "norm_topk_prob": FixedField(True, (True,), "the library always normalises the gates"),
        "decoder_sparse_step": ReadField(1, SIZE),
        "mlp_only_layers": ReadField(None, Values.indices().or_null),
        "sliding_window": UnusedField("the library has no windows here, whatever it says"),
    },
    aliases={"num_local_experts": "num_experts"},
    settings=_sparse_text,
    write=_written_sparse,
    implied={"qk_norm": True, "moe_router_normalize": True},
    training=EXPERTS_TRAINING,
    altering=EXPERTS_ALTERING,
    longest="max_position_embeddings",
)
"""The decoder of Qwen3-VL-MoE."""


# The tower.


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


def _third_tower_form(model_type: str) -> PublicForm:
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


# The whole config.json.


IDS = {
    "image_token_id": ("image_token", 151655),
    "video_token_id": ("video_token", 151656),
    "vision_start_token_id": ("start_token", 151652),
    "vision_end_token_id": ("end_token", 151653),
}
"""The field of a token's number -> our setting of the tower, and the library's default."""


def _whole(values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of tokens; the tower's result must be as wide as the decoder."""
    tokens = {ours: values[name] for name, (ours, _) in IDS.items()}
    width, expected = values[VISION]["out_hidden_size"], values[TEXT]["hidden_size"]
    if width != expected:
        raise ValueError(
            f"its field '{VISION}.out_hidden_size' is {width}, but the family supports {expected} only, which is "
            f"'{TEXT}.hidden_size'"
        )
    return {"vision": tokens}


def _second_whole(values: Mapping[str, Any]) -> dict[str, Any]:
    """Older folders say in the decoder's mapping whether embedding and output projection are one table."""
    tied = [values["tie_word_embeddings"], values[TEXT]["tie_word_embeddings"]]
    return {"tie_embeddings": any(tied), **_whole(values)}


def _written_whole(config: "QwenVLConfig") -> dict[str, Any]:
    vision = config.vision
    return {} if vision is None else {name: getattr(vision, ours) for name, (ours, _) in IDS.items()}


def _written_second_whole(config: "QwenVLConfig") -> dict[str, Any]:
    return {**_written_whole(config), "tie_word_embeddings": config.tie_embeddings}


def _width(config: "QwenVLConfig") -> dict[str, Any]:
    return {"out_hidden_size": config.hidden_size}


def _fields(text: PublicForm, tower: PublicForm) -> dict[str, PublicField]:
    return {
        **SHARED_FIELDS,
        TEXT: FormField(text),
        VISION: FormField(tower, "vision", altering=True, write=_width),
        **{name: ReadField(default, TOKEN) for name, (_, default) in IDS.items()},
        "vision_token_id": UnusedField("the library has no such field"),
    }


SECOND = PublicForm(
    preparation=preparation.SECOND,
    architecture="Qwen2_5_VLForConditionalGeneration",
    model_type="qwen2_5_vl",
    fields={**_fields(SECOND_TEXT, SECOND_TOWER), "tie_word_embeddings": ReadField(False, Values.flag())},
    settings=_second_whole,
    write=_written_second_whole,
    flat=TEXT,
)
"""Qwen2.5-VL; the released folders have the fields of the decoder beside the tower's mapping."""
DENSE = PublicForm(
    preparation=preparation.THIRD,
    architecture="Qwen3VLForConditionalGeneration",
    model_type="qwen3_vl",
    fields={**_fields(THIRD_TEXT, _third_tower_form("qwen3_vl_vision")), **tied_fields(False)},
    settings=_whole,
    write=_written_whole,
)
SPARSE = PublicForm(
    preparation=preparation.THIRD,
    architecture="Qwen3VLMoeForConditionalGeneration",
    model_type="qwen3_vl_moe",
    fields={**_fields(SPARSE_TEXT, _third_tower_form("qwen3_vl_moe_vision")), **tied_fields(False)},
    settings=_whole,
    write=_written_whole,
)
FORMS = (DENSE, SPARSE, SECOND)
