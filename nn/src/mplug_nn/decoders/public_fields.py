"""Rows of a config.json that many decoders share, and what several of its fields decide together. No torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from mplug_nn.decoders.general import GeneralDecoderConfig
from mplug_nn.decoders.sparse import SparseDecoderConfig
from mplug_nn.public_form import PublicField
from mplug_nn.public_rows import FixedField, ReadField, UnusedField
from mplug_nn.public_values import Values, shown
from mplug_nn.shared_fields import SHARED_FIELDS

ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
}
"""The library's activation of a gate -> model.activation."""
LAYERS = Values.integer(most=10_000)  # lists of blocks are made before the settings are checked
TYPES = {"full_attention": "full", "sliding_attention": "window"}
"""Entry of `layer_types` -> entry of `attention_types`."""
SIZES = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size",),
    "intermediate_size": ("ffn_hidden_size",),
    "num_hidden_layers": ("num_layers",),
    "num_attention_heads": ("num_attention_heads",),
    "max_position_embeddings": (),
}
"""Field with a size -> our settings."""
EXPERTS_TRAINING = {
    "z_loss_coefficient": 0.0,
    "moe_balance": "sequence",
    "moe_router_jitter": 0.0,
    "capacity_dropping": "probability",
    "aux_loss_coefficient": 0.0,
}
"""Settings of experts that only training uses."""
EXPERTS_ALTERING = {"capacity_factor": None, "expert_bias_rate": 0.0}
"""Settings of experts that a user may choose, and that no config.json expresses."""


def decoder_fields(**defaults: int) -> dict[str, PublicField]:
    """The rows of most families, with the library's default of each size (`SIZES`) of one of them.

    They are the sizes, the activation, the norms' epsilon, the standard deviation of initial weights, and
    `SHARED_FIELDS`.
    """
    return {
        **SHARED_FIELDS,
        **{name: ReadField(defaults[name], Values.integer(), SIZES[name]) for name in SIZES},
        "num_hidden_layers": ReadField(defaults["num_hidden_layers"], LAYERS, SIZES["num_hidden_layers"]),
        "rms_norm_eps": ReadField(1e-6, Values.positive(), ("norm_eps",)),
        "initializer_range": ReadField(0.02, Values.not_negative(), ("init_std",), training=True),
        "attention_dropout": FixedField(0.0, (0.0,), "the family has no dropout of attention weights"),
        **activation_field("hidden_act", "silu"),
    }


def activation_field(name: str, default: str) -> dict[str, PublicField]:
    """The row of the activation of gated MLPs and experts, with the library's default."""
    return {name: ReadField(default, Values.one_of(*ACTIVATIONS), ("activation",), ACTIVATIONS)}


def heads_fields(kv_heads: int | None, head_dim: int | None, *, null: tuple[str, ...]) -> dict[str, PublicField]:
    """The rows of key-value heads and of a head's width, with the library's defaults; `null`: those that may be null.

    None and null mean as many heads as queries have, and hidden_size / heads.
    """
    defaults = {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    settings = {"num_key_value_heads": ("num_kv_heads",), "head_dim": ("head_dim",)}
    size = Values.integer()
    return {
        name: ReadField(default, size.or_null if name in null else size, settings[name])
        for name, default in defaults.items()
    }


def tied_fields(default: bool) -> dict[str, PublicField]:
    """The row of an embedding table that is the output projection too."""
    return {"tie_word_embeddings": ReadField(default, Values.flag(), ("tie_embeddings",))}


UNTIED_FIELDS: dict[str, PublicField] = {"tie_word_embeddings": FixedField(False, (False,))}
"""The row of a family whose output projection is never the embedding table."""
SLICES_FIELDS: dict[str, PublicField] = {
    "pretraining_tp": UnusedField("older releases computed the same products in this number of slices")
}
"""The row of older configs of Llama and DeepSeek."""
ROUTER_LOSS_FIELDS: dict[str, PublicField] = {
    "router_aux_loss_coef": ReadField(0.001, Values.not_negative(), ("aux_loss_coefficient",), training=True),
    "output_router_logits": UnusedField("the library adds the balancing loss by it; mplug always does"),
}
"""The rows of the balancing loss."""


# Rotary positions

_OPTIONS: dict[str, dict[str, Values]] = {
    "default": {},
    "linear": {"factor": Values.positive()},
    "llama3": {
        name: Values.positive()
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    },
    "yarn": {
        "factor": Values.positive().or_null,
        "original_max_position_embeddings": Values.positive(),
        "attention_factor": Values.positive().or_null,
        "beta_fast": Values.not_negative().or_null,
        "beta_slow": Values.not_negative().or_null,
        "mscale": Values.not_negative().or_null,
        "mscale_all_dim": Values.not_negative().or_null,
        "truncate": Values.flag().or_null,
    },
    "longrope": {
        "factor": Values.positive().or_null,
        "original_max_position_embeddings": Values.positive(),
        "attention_factor": Values.positive().or_null,
        "short_factor": Values.divisors(),
        "long_factor": Values.divisors(),
    },
}
"""By type of rotary positions, the supported values of its options."""
_OPTIONAL = ("original_max_position_embeddings", *list(_OPTIONS["yarn"])[2:])
_UNUSED_IF_NULL = {name for options in _OPTIONS.values() for name in options}
_UNUSED_IF_NULL |= {"mrope_section"}
PARTIAL = FixedField(None, (None, 1.0), "the library ignores other values, or fails with them")


def rotary_fields(theta: float = 10000.0) -> dict[str, PublicField]:
    """The rows of rotary positions in their older and newer form. `theta` is the library's default."""
    return {
        "rope_parameters": ReadField(None, Values.mapping().or_null),
        "rope_scaling": ReadField(None, Values.mapping().or_null),
        "rope_theta": ReadField(theta, Values.positive()),
        "partial_rotary_factor": PARTIAL,
    }


def rotary_settings(values: Mapping[str, Any], otherwise: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of the fields of `rotary_fields`, as the library combines them.

    `rope_scaling` of older folders stands for the whole `rope_parameters`. `otherwise` is the value of an absent or
    null `rope_parameters`.
    """
    older, newer = values["rope_scaling"], values["rope_parameters"]
    if older and newer and older != newer:
        raise ValueError("its fields 'rope_parameters' and 'rope_scaling' contradict each other")
    if older:
        return read_rotary("rope_scaling", older, values)
    return read_rotary("rope_parameters", (otherwise or {}) if newer is None else newer, values)


def read_rotary(
    where: str, given: Mapping[str, Any], values: Mapping[str, Any], theta: str = "rope_theta"
) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of one mapping of options, which is the field `where`.

    `theta` is the field with the base for a mapping that does not state one.
    """
    kind = given.get("rope_type", given.get("type", "default"))
    if "rope_type" in given and "type" in given and given["type"] != kind:
        raise ValueError(f"its field '{where}' has two types, {shown(kind)} and {shown(given['type'])}")
    if not isinstance(kind, str) or kind not in _OPTIONS:
        known = Values.one_of(*_OPTIONS)
        raise ValueError(ReadField(None, known).check(f"{where}.rope_type", kind))
    base = given.get("rope_theta", values[theta])
    _refuse(f"{where}.rope_theta", base, Values.positive())
    options = _options(where, kind, given, values["max_position_embeddings"])
    if kind == "yarn" and base == 1:
        raise ValueError(f"its field '{where}' scales by YaRN, which rope_theta=1 does not allow")
    if kind == "llama3" and options["high_freq_factor"] <= options["low_freq_factor"]:
        raise ValueError(f"its field '{where}' has a high_freq_factor that is not above low_freq_factor")
    return {"rope_theta": base, "rope_scaling": None if kind == "default" else {"type": kind, **options}}


def _options(where: str, kind: str, given: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """The options of a scaling as our function of that name takes them."""
    known = _OPTIONS[kind]
    for name, value in given.items():
        if name in ("rope_type", "type", "rope_theta") or name in known:
            continue
        if name == "partial_rotary_factor" and (value is not None or kind != "default"):
            problem = FixedField(1.0, (1.0,), PARTIAL.because).check(f"{where}.{name}", value)
            if problem is not None:
                raise ValueError(problem)
        elif value is not None or name not in (*_UNUSED_IF_NULL, "partial_rotary_factor"):
            raise ValueError(f"its field '{where}.{name}' is unknown for rotary positions of the type '{kind}'")
    for name in known:
        if name not in given and name not in _OPTIONAL and (kind, name) != ("longrope", "factor"):
            raise ValueError(f"it lacks the field '{where}.{name}'")
    found = {name: given[name] for name in known if name in given}
    if kind == "longrope":
        found.setdefault("factor", None)
    if "original_max_position_embeddings" in known:
        found.setdefault("original_max_position_embeddings", longest)
    for name, value in found.items():
        _refuse(f"{where}.{name}", value, known[name])
    return _of_library(kind, found, longest)


def _of_library(kind: str, found: dict[str, Any], longest: int) -> dict[str, Any]:
    """The options without those that the library replaces by its defaults."""
    if kind not in ("yarn", "longrope"):
        return found
    if found["factor"] is None:
        found["factor"] = longest / found["original_max_position_embeddings"]
    if kind == "longrope":
        return _of_longrope(found)
    if found.get("truncate", True) is None:
        found["truncate"] = False
    zero_is_none = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    return {
        name: value for name, value in found.items() if value is not None and not (value == 0 and name in zero_is_none)
    }


def _of_longrope(found: dict[str, Any]) -> dict[str, Any]:
    """The options with one list of divisors; an absent `attention_factor` is computed."""
    if found.pop("short_factor") != found["long_factor"]:
        raise ValueError(
            "its rotary positions have one list of divisors for short batches and another for long ones, so what a "
            "sample computes would depend on the others of its batch; the family supports equal lists only"
        )
    return {name: value for name, value in found.items() if value is not None}


def _refuse(name: str, value: Any, values: Values) -> None:
    problem = ReadField(None, values).check(name, value)
    if problem is not None:
        raise ValueError(problem)


def written_heads(config: SparseDecoderConfig) -> dict[str, Any]:
    """The fields of heads and of their width."""
    return {"num_key_value_heads": config.kv_heads, "head_dim": config.head_width}


def written_rotary(theta: float, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of rotary positions, in the older and the newer form, so that older releases read the same."""
    options = dict(scaling or {"type": "default"})
    rope = {"rope_type": options.pop("type"), "rope_theta": theta, **options}
    if rope["rope_type"] == "longrope":
        rope["short_factor"] = rope["long_factor"] = list(rope["long_factor"])
    return {"rope_theta": theta, "rope_scaling": rope if scaling else None, "rope_parameters": rope}


# What each block mixes its tokens by


LAYER_TYPES_FIELDS: dict[str, PublicField] = {"layer_types": ReadField(None, Values.names().or_null)}
"""The row of the types of the blocks' attention, or of their mixers."""


def attention_types(values: Mapping[str, Any], otherwise: Sequence[str]) -> tuple[str, ...]:
    """The types of the blocks' attention, by `layer_types`, or else `otherwise`; as a list that repeats."""
    return shortest(list(otherwise)) if values["layer_types"] is None else block_types(values, TYPES)


def block_types(
    values: Mapping[str, Any], named: Mapping[str, str], otherwise: Sequence[str] = (), field: str = "layer_types"
) -> tuple[str, ...]:
    """Our names of what a list of a config.json says of each block, as a list that repeats.

    `named` maps the published names to ours; `otherwise` are published names for a file without the list. Raises
    ValueError if the list has another length than the number of blocks, or other names.
    """
    number = values["num_hidden_layers"]
    found = otherwise if values[field] is None else values[field]
    if len(found) != number or not all(one in named for one in found):
        raise ValueError(f"its field '{field}' is not a list of {number} of {', '.join(named)}")
    return shortest([named[one] for one in found])


def shortest(types: Sequence[str]) -> tuple[str, ...]:
    """The shortest beginning of a list that repeats to the whole list."""
    lengths = range(1, len(types) + 1)
    length = next(n for n in lengths if all(one == types[place % n] for place, one in enumerate(types)))
    return tuple(types[:length])


def layer_types(config: GeneralDecoderConfig) -> list[str]:
    """The field `layer_types` of the blocks' attention: an entry per block."""
    named = {ours: theirs for theirs, ours in TYPES.items()}
    return [named[config.entry("attention_types", number)] for number in range(config.num_layers)]


def mixer_layer_types(config: GeneralDecoderConfig, named: Mapping[str, str]) -> list[str]:
    """The field `layer_types` of the blocks' mixers: an entry per block; of several names for a mixer, the first.

    `named` maps the published names to ours. Raises ValueError if the form has no name for a mixer.
    """
    published = {ours: theirs for theirs, ours in reversed([*named.items()])}
    kinds = [config.mixer_type(number) for number in range(config.num_layers)]
    if unknown := sorted(set(kinds) - set(published)):
        raise ValueError(f"no entry of 'layer_types' means model.mixer_types={unknown[0]!r}")
    return [published[kind] for kind in kinds]
