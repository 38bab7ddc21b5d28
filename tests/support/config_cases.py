"""Random config.json files of the families that mplug reads, over the fields of transformers' own config classes.

A case has a tiny shape. Each other field is absent, or has a value that published folders have, or one that is rare or
unsupported, or null. A field of transformers' classes that this file does not name gets values by its type, so a field
that a new version of transformers adds occurs without a change here.
"""

import dataclasses
from random import Random
from typing import Any

from config_rotary import rotary_of
from config_shapes import LINEAR, layer_types_of, shape_of
from config_values import FOREIGN, NEUTRAL, RARE, USUAL, Fields

ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
"""`model_type` -> its architecture."""
ABSENT = object()


@dataclasses.dataclass(frozen=True)
class Case:
    """A config.json, and the seed of the weights and of the batch."""

    fields: Fields
    seed: int


def case_of(kind: str, seed: int) -> Case:
    draw = Random(f"{kind} {seed}")
    fields = {"architectures": [ARCHITECTURES[kind]], "model_type": kind, **shape_of(draw, kind)}
    if kind not in ("gpt2", "nemotron_h", "kimi_linear"):
        fields |= rotary_of(draw, kind, fields)
    defaults = defaults_of(kind)
    if kind == "nemotron_h" and draw.random() < 0.2:
        letters = "".join(draw.choice("M*-E") for _ in range(3))
        fields = {**fields, "layers_block_type": None, "hybrid_override_pattern": letters}
    if "layer_types" in defaults and draw.random() < 0.5:
        fields["layer_types"] = layer_types_of(
            draw, fields["num_hidden_layers"], "linear" if kind in LINEAR else "sliding"
        )
        if "sliding_attention" in fields["layer_types"] and draw.random() < 0.95:
            fields["sliding_window"] = draw.choice((3, 6, 4096))
            fields |= {"use_sliding_window": True} if "use_sliding_window" in defaults else {}
    for name in draw.sample(sorted(defaults), draw.choice((0, 2, 4, 8))):
        if name not in fields:
            _put(fields, name, _usual(draw, name, defaults[name]))
    for name in draw.sample(sorted(NEUTRAL), draw.choice((0, 0, 2))):
        fields[name] = NEUTRAL[name]
    if seed % 10 == 3:  # every field in turn, with another value than its default
        names = sorted({*defaults, *aliases_of(kind)})
        name = names[seed // 10 % len(names)]
        fields[name] = _other(draw, name, defaults.get(name, 1))
    elif draw.random() < 0.35:
        for _ in range(draw.choice((1, 1, 2))):
            _strange(draw, fields, defaults)
    return Case(fields, seed)


def defaults_of(kind: str) -> Fields:
    """The fields of transformers' config class of a `model_type`, with their defaults; those without one are None."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = dataclasses.fields(CONFIG_MAPPING[kind])
    found = {one.name: None if one.default is dataclasses.MISSING else one.default for one in fields}
    return {name: default for name, default in found.items() if name not in ("architectures", "rope_parameters")}


def aliases_of(kind: str) -> list[str]:
    """Other names that transformers' class has for its fields."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return sorted(CONFIG_MAPPING[kind].attribute_map)


def _put(fields: Fields, name: str, value: Any) -> None:
    if value is not ABSENT:
        fields[name] = value


def _usual(draw: Random, name: str, default: Any) -> Any:
    """A value that published folders have; sizes keep their defaults, which are absent fields."""
    if name in USUAL:
        return draw.choice(USUAL[name]) if USUAL[name] else ABSENT
    if isinstance(default, bool) or default is None or isinstance(default, str):
        return default
    return ABSENT


def _other(draw: Random, name: str, default: Any) -> Any:
    """Another value than the default of a field."""
    named = [value for value in (*USUAL.get(name, ()), *RARE.get(name, ())) if value != default]
    return draw.choice(named) if named else _of_type(draw, default)


def _strange(draw: Random, fields: Fields, defaults: Fields) -> None:
    """Change the fields in a way that a family may have to refuse."""
    kind = fields["model_type"]
    match draw.choice(("rare", "rare", "null", "type", "foreign", "foreign", "alias", "other", "absent")):
        case "rare":
            name = draw.choice(sorted(set(defaults) & set(RARE)))
            fields[name] = draw.choice(RARE[name])
        case "null":
            fields[draw.choice(sorted({*defaults, *fields} - {"architectures", "model_type"}))] = None
        case "type":
            name = draw.choice(sorted(defaults))
            fields[name] = _of_type(draw, fields.get(name, defaults[name]))
        case "foreign":
            name = draw.choice(sorted(FOREIGN))
            fields[name] = FOREIGN[name]
        case "alias" if aliases_of(kind):
            fields[draw.choice(aliases_of(kind))] = draw.choice((1, 2, 4, 32))
        case "absent":
            name = draw.choice(sorted(set(fields) - {"architectures", "model_type", "vocab_size"}))
            if not isinstance(defaults.get(name), int) or defaults[name] <= 256:
                del fields[name]
        case _:
            fields[draw.choice(("use_gate", "norm_type", "new_field"))] = draw.choice((1, True, "a", [], 0.0, False))


def _of_type(draw: Random, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice((value + 1, max(value // 2, 1), 1, float(value)))
    if isinstance(value, float):
        return draw.choice((value * 2, value + 0.5, 1))
    if isinstance(value, str):
        return draw.choice((value.upper(), "other"))
    return draw.choice((1, 2.0, True, "a", [1]))
