"""What kernels that a plan names change about a step, as data: the plan may be made where they are not installed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Kernels:
    """The kinds of slots that kernels fill, and what follows.

    `supplied` are kinds whose results backward keeps (norms). `fuses_activation` says that the products of an MLP
    compute its activation, `fuses_casts` that norms and activations write the 8-bit inputs of products. `attention` is
    the factor of the rate of attention, and `between` that of kernels between products. `grouped` is the part of the
    rate of products that grouped products reach (None: torch's). `keeps_weights` says that copies of weights in 8 bits
    last for a step. `assumed` are the kernels that a machine without GPUs cannot check.
    """

    supplied: frozenset[str] = frozenset()
    fuses_activation: bool = False
    fuses_casts: bool = False
    attention: float = 1.0
    grouped: float | None = None
    between: float = 1.0
    keeps_weights: bool = False
    assumed: tuple[str, ...] = ()

    @classmethod
    def of(cls, section: Mapping[str, Any], keeps_weights: bool = False) -> "Kernels":
        """What the kernels of a config's section `kernels` change: a plugin for each kind, and 'default'.

        A default fills every kind that it offers. Of a list of defaults, the fastest one is taken to fill attention and
        no other kind. A kind whose plugin is None is left to plain torch.
        """
        facts: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("kernels.yaml").read_text())
        chosen = dict(section)
        default = chosen.pop("default", None) or ""
        rivals = default if isinstance(default, list) else [default]
        if isinstance(default, list):
            default = ""
            if "attention" not in chosen and rivals:
                chosen["attention"] = max(rivals, key=lambda name: facts.get(name, {}).get("attention", 0.0))
        filled = {**dict.fromkeys(facts.get(default, {}).get("fills", ()), default), **chosen}
        kinds = {kind: name for kind, name in filled.items() if name}
        attention = facts.get(kinds.get("attention", default), {})
        return cls(
            supplied=frozenset({"norm"} if "norm" in kinds and "norm_product" not in kinds else ()),
            fuses_activation="mlp" in kinds,
            fuses_casts="norm_product" in kinds,
            attention=float(attention.get("attention", 1.0)),
            grouped=facts.get(kinds.get("experts", ""), {}).get("grouped"),
            between=float(facts.get(kinds.get("norm", ""), {}).get("between", 1.0)),
            keeps_weights=keeps_weights,
            assumed=tuple(sorted(name for name in {*kinds.values(), *rivals} if facts.get(name, {}).get("gpu"))),
        )
