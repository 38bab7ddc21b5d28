"""The features whose pairs are tested, and the settings of a case: the tables of pair_features.yaml.

The features of `MATHEMATICS` decide what a run computes. All others decide only how it computes it: the reference of a
case has their defaults, in one process.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from covering import Case

Settings = dict[str, Any]

_TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
BASE: Settings = _TABLES["base"]
_OF_SEEING = _TABLES["seeing"]
_OWN: dict[str, dict[str, Settings]] = {name: one["values"] for name, one in _OF_SEEING["features"].items()}
_GENERAL: dict[str, dict[str, Settings]] = {name: one["values"] for name, one in _TABLES["features"].items()}
VALUES = {name: {**_GENERAL.get(name, {}), **_OWN.get(name, {})} for name in {**_GENERAL, **_OWN}}
MEANING: dict[str, str] = {name: one["meaning"] for name, one in _TABLES["features"].items()}
SEEING_MEANING: dict[str, str] = {name: one["meaning"] for name, one in _OF_SEEING["features"].items()}
FEATURES: dict[str, tuple[str, ...]] = {name: tuple(values) for name, values in _GENERAL.items()}
LAYERS, BATCH = BASE["model.num_layers"], BASE["trainer.global_batch_size"]
GENERAL = {"qwen-experts", "llama", "qwen", "gemma", "gpt-oss", "deepseek"}
"""The families with the fields of `GeneralDecoderConfig`."""
HEAD_ALONE = "pp2 1f1b, head alone"
STRATEGIES = ("data", "tensor", "context", "pipeline", "experts")
SEES: str = _OF_SEEING["family"]
"""The family with a tower, whose cases are an array of their own: no other family takes media."""
MATHEMATICS = ("family", "mixing", "mixture", "ahead", "tied", "packed", "adapter", "frozen", "optimizer", "media")
SEEING: dict[str, tuple[str, ...]] = {
    **{name: tuple(values) for name, values in _OWN.items()},
    **{name: tuple(value for value in FEATURES[name] if value != HEAD_ALONE) for name in _OF_SEEING["shared"]},
}
"""The features of its array: its own, and some of those of the others."""
COSTLY = ("compile",)
"""Features whose other values cost more than everything else of a case."""
PRODUCT = {
    **{name: FEATURES[name] for name in ("pipeline", "ahead", "tied", "packed", "compile")},
    "pipeline": FEATURES["pipeline"][1:],
    "ahead": ("0", "2"),
}
"""Every combination of these values is in a case of the array's second part."""


def small_enough(case: Case) -> bool:
    """At most two strategies: a case has at most 4 ranks. Its micro batches fit into the run that resumes it."""
    return sum(case.get(name, "none") != "none" for name in STRATEGIES) <= 2 and _resumes_alike(case)


def _resumes_alike(case: Case) -> bool:
    """Whether data-parallel ranks can resume a case with its own micro batches, if these decide what it computes."""
    names = ("mixture", "resume", "micro batches", *STRATEGIES)
    if case.get("mixture") != "capacity" or case.get("resume") != "as dp" or any(one not in case for one in names):
        return True
    return _samples(case) * 2 ** sum(case[name] != "none" for name in STRATEGIES) <= BATCH


def seeing(case: Case) -> Case:
    """A case of the array of the family that sees, with the defaults of all other features."""
    return {**{name: values[0] for name, values in FEATURES.items()}, "family": SEES, **case}


def named_cases(data: Mapping[str, Any]) -> dict[str, Case]:
    """All cases of the file by name: `pair-007`, `product-012`, `seeing-003`."""
    lists = {"pair": data["pairs"], "product": data["product"], "seeing": [*map(seeing, data["seeing"])]}
    return {f"{name}-{number:03}": case for name, cases in lists.items() for number, case in enumerate(cases)}


DENSE = ("gpt", "gpt alibi", "llama", "qwen")
"""Families whose blocks are of one kind and compile fast."""


def few_with_every_value(cases: Mapping[str, Case]) -> set[str]:
    """The names of few cases of pairs that are not compiled, in which every other value of theirs occurs.

    Each is the one with the most new values for its cost. Families that see and compiled units have tests of their own.
    """
    own = {name: case for name, case in cases.items() if name.startswith("pair-") and case["compile"] == "never"}
    missing = {item for case in own.values() for item in case.items()}
    chosen: set[str] = set()
    while missing:
        best = max(own, key=lambda name: len(missing & own[name].items()) / _cost(own[name]))
        chosen.add(best)
        missing -= own[best].items()
    return chosen


def _cost(case: Case) -> float:
    """CPU seconds of a case, roughly: compiled units cost the most, and the more, the larger their graphs are."""
    strategies = sum(case[name] != "none" for name in STRATEGIES)
    larger = sum(case[name] != FEATURES[name][0] for name in ("ahead", "adapter", "recompute", "packed"))
    experts = case["family"] not in DENSE
    return float(2**strategies * (0.5 if case["compile"] == "never" else 4 + 4 * larger + 4 * experts))


def settings_of(case: Case) -> Settings:
    """The settings of the run of a case."""
    return {**_mathematics(case), **_execution(case)}


def reference_of(case: Case) -> Settings:
    """The settings of the reference: one process, everything in plain torch.

    It has one micro batch, or those of the case if they decide which choices of experts are dropped.
    """
    samples = _samples(case) if case.get("mixture") == "capacity" else BATCH
    plain = {"kernels.default": None, "parallel.layout": "", "trainer.micro_batch_size": samples}
    return {**_mathematics(case), **plain}


def resumed_settings(case: Case, world_size: int) -> Settings:
    """The settings of the run that continues the case after its first step."""
    if case["resume"] != "as dp" or world_size == 1:
        return settings_of(case)
    alone = {**case, **dict.fromkeys(STRATEGIES, "none")}
    samples = _samples(case) if case.get("mixture") == "capacity" else BATCH // world_size
    divided = {"parallel.layout": f"dp{world_size}", "trainer.micro_batch_size": samples}
    return {**settings_of(alone), **divided}


def _mathematics(case: Case) -> Settings:
    family, found = case["family"], dict(BASE)
    if family == SEES:
        found |= _OF_SEEING["settings"]
    for name in (name for name in MATHEMATICS if name in case and (name, case[name]) != ("family", SEES)):
        if name != "mixing" or family in GENERAL or case[name] != "full":
            found |= VALUES[name][case[name]]
    if family != "mixtral" or case["tied"] == "yes":
        found["model.tie_embeddings"] = case["tied"] == "yes"
    return found


def _execution(case: Case) -> Settings:
    found: Settings = {}
    words = []
    for name in (name for name in VALUES if name in case and name not in MATHEMATICS):
        own = dict(VALUES[name][case[name]])
        words.append(own.pop("parallel.layout", ""))
        found |= own
    if case["pipeline"] == HEAD_ALONE:
        found["parallel.pp.split"] = [LAYERS + 1 + (case["ahead"] != "0"), 1]
    return {**found, "parallel.layout": "".join(words), "trainer.micro_batch_size": _samples(case)}


def _samples(case: Mapping[str, str]) -> int:
    """Samples of a micro batch of a case."""
    ranks = 2 if case["data"] != "none" or _is_ep_alone(case) else 1
    return BATCH // ranks // int(case["micro batches"])


def _is_ep_alone(case: Mapping[str, str]) -> bool:
    """Whether the ranks of experts are data-parallel ranks of the dense view, which nothing else divides."""
    divides = any(case[name] != "none" for name in ("tensor", "context"))
    return case["experts"] != "none" and case["data"] == "none" and not divides
