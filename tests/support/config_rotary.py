"""Rotary settings of generated config.json files: usual ones, and odd ones that must be honoured or refused."""

from random import Random
from typing import Any

from config_values import Fields, Pool

# Rotary positions.

THETAS = (1e2, 500, 10000.0, 1e6)


def rotary_of(draw: Random, kind: str, fields: Fields) -> Fields:
    width = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    pairs = fields.get("qk_rope_head_dim", width) // 2
    if kind == "gemma3_text" and draw.random() < 0.7:
        return _two_rotaries(draw, pairs)
    match draw.choice(("absent", "theta", "new", "new", "old", "old", "odd")):
        case "absent":
            return {}
        case "theta":
            return {"rope_theta": draw.choice(THETAS)}
        case "new":
            theta = {"rope_theta": draw.choice(THETAS)}
            inside, outside = draw.choice(((theta, {}), (theta, {}), ({}, theta), ({}, {})))
            return {"rope_parameters": {"rope_type": "default", **_scaling(draw, pairs), **inside}, **outside}
        case "old":
            found = _scaling(draw, pairs)
            if "rope_type" in found and draw.random() < 0.5:
                found["type"] = found.pop("rope_type")
            return {"rope_scaling": found or None, "rope_theta": draw.choice(THETAS)}
        case _:
            return _odd_rotary(draw, pairs)


def _odd_rotary(draw: Random, pairs: int) -> Fields:
    """Forms that no one should write, but that a config.json may have."""
    found = {"rope_type": "default", **_scaling(draw, pairs), "rope_theta": draw.choice((*THETAS, 1.0, None))}
    match draw.randrange(7):
        case 0:
            return {"rope_parameters": {}, "rope_scaling": None}
        case 1:
            return {"rope_parameters": None, "rope_theta": None}
        case 2:
            return {"rope_parameters": found, "rope_scaling": _scaling(draw, pairs), "rope_theta": 300.0}
        case 3:
            return {"rope_parameters": {**found, "partial_rotary_factor": draw.choice((0.5, 1.0))}}
        case 4:
            return {"rope_parameters": {**found, "type": draw.choice(("linear", "default", "yarn"))}}
        case 5:
            return {"rope_parameters": {**found, draw.choice(("finetuned", "factor", "low_freq_factor")): 3.0}}
        case _:
            return {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), found)}


def _scaling(draw: Random, pairs: int) -> Fields:
    """A scaling of rotary positions of this number of pairs, with its options, without theta; empty: none."""
    original = {"original_max_position_embeddings": draw.choice((8, 16, 16, 32))} if draw.random() < 0.8 else {}
    factor = {"factor": draw.choice((2.0, 4, 8.0))}
    if draw.random() < 0.08:
        factor = {"factor": draw.choice((1.0, 0.5, 0, None))}
    match draw.choice(("", "linear", "llama3", "yarn", "yarn", "other")):
        case "":
            return {}
        case "linear":
            return {"rope_type": "linear", **factor}
        case "llama3":
            bounds = (1.0, 4.0) if draw.random() < 0.8 else draw.choice(((1.0, 1.0), (4.0, 1.0), (1, 2), (0.5, 32.0)))
            bounded = {"low_freq_factor": bounds[0], "high_freq_factor": bounds[1]}
            return {"rope_type": "llama3", **factor, **bounded, **original}
        case "yarn":
            return {"rope_type": "yarn", **factor, **original, **_yarn_options(draw)}
        case _:
            other = {"rope_type": draw.choice(("dynamic", "dynamic", "longrope", "longrope", "proportional", "su"))}
            if other["rope_type"] == "longrope":
                other |= {"short_factor": [1.5] * pairs, "long_factor": [3.0] * pairs, **original}
            return {**other, **factor}


YARN_OPTIONS: dict[str, Pool] = {
    "beta_fast": (32, 4.0, 0.5, None),
    "beta_slow": (1, 0.25, None, 0, 40),
    "mscale": (1.0, 0.7, 0, None),
    "mscale_all_dim": (1.0, 0.9, 0, None),
    "attention_factor": (1.2, 1, None),
    "truncate": (True, False),
}


def _yarn_options(draw: Random) -> Fields:
    names = [name for name in YARN_OPTIONS if draw.random() < 0.35]
    return {name: draw.choice(YARN_OPTIONS[name]) for name in names}


def _two_rotaries(draw: Random, pairs: int) -> Fields:
    """Gemma 3: positions of blocks with and without windows, in the new and in the old form."""
    if draw.random() < 0.4:
        old = {"rope_theta": draw.choice(THETAS), "rope_local_base_freq": draw.choice(THETAS)}
        old = {name: value for name, value in old.items() if draw.random() < 0.8}
        return old | ({"rope_scaling": _scaling(draw, pairs) or None} if draw.random() < 0.6 else {})
    found: Fields = {}
    for name in ("full_attention", "sliding_attention"):
        theta = {"rope_theta": draw.choice(THETAS)} if draw.random() < 0.8 else {}
        scaled = _scaling(draw, pairs) if name == "full_attention" or draw.random() < 0.2 else {}
        entry: Any = {"rope_type": "default", **scaled, **theta}
        if draw.random() < 0.1:
            entry = draw.choice((None, {}, theta))
        if draw.random() < 0.85:
            found[name] = entry
    more = {"rope_theta": 300.0} if draw.random() < 0.1 else {}
    return {"rope_parameters": found, **more}
