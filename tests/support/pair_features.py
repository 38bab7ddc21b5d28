"""The features whose pairs are tested, and the settings of a case: the tables of pair_features.yaml.

The features of `MATHEMATICS` and `workers` decide what a run computes. All others decide only how it computes it: the
reference of a case has their defaults, in one process, or in one for each worker.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from covering import Case, default_case

Settings = dict[str, Any]

_TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
BASE: Settings = _TABLES["base"]
_GENERAL: dict[str, dict[str, Settings]] = {name: one["values"] for name, one in _TABLES["features"].items()}
MEANING: dict[str, str] = {name: one["meaning"] for name, one in _TABLES["features"].items()}
_CLASSES = [f"class {number}" for number in range(BASE["model.vocab_size"])]
_GENERAL["objective"]["classify"]["objectives.classify.labels"] = _CLASSES
FEATURES: dict[str, tuple[str, ...]] = {name: tuple(values) for name, values in _GENERAL.items()}
LAYERS, BATCH = BASE["model.num_layers"], BASE["trainer.global_batch_size"]
GENERAL = {"qwen-experts", "llama", "qwen", "gemma", "gpt-oss", "deepseek"}
"""The families with the fields of `GeneralDecoderConfig`."""
HEAD_ALONE = "pp2 1f1b, head alone"
TEACHERS_UNITS = 1 + _GENERAL["objective"]["distill"]["objectives.distill.teacher"]["num_layers"]
"""The embedding and the blocks of the teacher of 'distill': its head computes in that of the student."""
DIVISIONS = ("data", "tensor", "context", "pipeline", "experts")
"""The features with strategies that divide what one process computes."""
STRATEGIES = ("workers", *DIVISIONS)
HEALED = ("healed with a spare", "healed with fewer")
"""The values of `resume` with which a rank dies in the second step."""
MATHEMATICS = (
    "family",
    "mixing",
    "kv heads",
    "mixture",
    "ahead",
    "tied",
    "packed",
    "objective",
    "adapter",
    "frozen",
    "optimizer",
    "media",
)


@dataclass(frozen=True)
class OwnArray:
    """The cases of families that lack fields of the others, or need other data.

    `about` says what is different. `settings` replace those of the base, and the fields `without` are left out of it.
    `values` and `meaning` are those of its own features; `features` are all features of its cases.
    """

    about: str
    settings: Settings
    without: tuple[str, ...]
    values: dict[str, dict[str, Settings]]
    meaning: dict[str, str]
    features: dict[str, tuple[str, ...]]

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> "OwnArray":
        """The array of a table of the file."""
        own = {name: one["values"] for name, one in table["features"].items()}
        shared = {name: tuple(value for value in FEATURES[name] if value != HEAD_ALONE) for name in table["shared"]}
        return cls(
            table["about"],
            table["settings"],
            tuple(table.get("without", ())),
            own,
            {name: one["meaning"] for name, one in table["features"].items()},
            {**{name: tuple(values) for name, values in own.items()}, **shared},
        )

    def whole(self, case: Case) -> Case:
        """A case with the defaults of all other features."""
        return {**{name: values[0] for name, values in FEATURES.items()}, **default_case(self.features), **case}

    @property
    def base(self) -> Settings:
        """The settings of every case."""
        return {name: value for name, value in BASE.items() if name not in self.without} | self.settings


ARRAYS: dict[str, OwnArray] = {name: OwnArray.of(table) for name, table in _TABLES["arrays"].items()}
"""The arrays beside that of all other families."""
SEEING = "seeing"
_ARRAY_OF = {family: array for array in ARRAYS.values() for family in array.features["family"]}
COSTLY = ("compile",)
"""Features whose other values cost more than everything else of a case."""
PRODUCT = {
    **{name: FEATURES[name] for name in ("pipeline", "ahead", "tied", "packed", "compile")},
    "pipeline": FEATURES["pipeline"][1:],
    "ahead": ("0", "2"),
    "packed": ("no", "yes"),
}
"""Every combination of these values is in a case of the array's second part."""


def small_enough(case: Case) -> bool:
    """At most two strategies: a case has at most 4 ranks. Its micro batches fit into the run that resumes it."""
    strategies = sum(case.get(name, "none") != "none" for name in STRATEGIES) + _is_replicated(case)
    return strategies <= 2 and _has_samples(case) and _resumes_alike(case)


def _has_samples(case: Case) -> bool:
    """Whether each micro batch has a sample; features that the case lacks have their defaults."""
    return _samples({**dict.fromkeys(STRATEGIES, "none"), "micro batches": "1", **case}) > 0


def _resumes_alike(case: Case) -> bool:
    """Whether data-parallel ranks can resume a case with its own micro batches, if these decide what it computes."""
    names = ("mixture", "resume", "micro batches", *STRATEGIES)
    if case.get("mixture") != "capacity" or case.get("resume") != "as dp" or any(one not in case for one in names):
        return True
    return _samples(case) * 2 ** sum(case[name] != "none" for name in STRATEGIES) <= BATCH


def named_cases(data: Mapping[str, Any]) -> dict[str, Case]:
    """All cases of the file by name: `pair-007`, `product-012`, `seeing-003`."""
    own = {name: [*map(array.whole, data[name])] for name, array in ARRAYS.items()}
    lists = {"pair": data["pairs"], "product": data["product"], **own}
    return {f"{name}-{number:03}": case for name, cases in lists.items() for number, case in enumerate(cases)}


DENSE = ("gpt", "gpt alibi", "llama", "qwen")
"""Families whose blocks are of one kind and compile fast."""


def few_with_every_value(cases: Mapping[str, Case]) -> set[str]:
    """The names of few cases that are not compiled: in those of pairs every other value of theirs occurs.

    Each is the one with the most new values for its cost. Another array has one case. Families that see, and compiled
    units, have tests of their own.
    """
    plain = {name: case for name, case in cases.items() if case["compile"] == "never"}
    own = {name: case for name, case in plain.items() if name.startswith("pair-")}
    missing = {item for case in own.values() for item in case.items()}
    chosen: set[str] = set()
    while missing:
        best = max(own, key=lambda name: len(missing & own[name].items()) / _cost(own[name]))
        chosen.add(best)
        missing -= own[best].items()
    for array in (array for name, array in ARRAYS.items() if name != SEEING):
        own = {name: case for name, case in plain.items() if _ARRAY_OF.get(case["family"]) is array}
        defaults = array.whole({}).items()
        chosen.add(max(own, key=lambda name: len(own[name].items() - defaults) / _cost(own[name])))
    return chosen


QUICK = ("pair-000", "pair-220", "pair-340", "pair-412", "packed-009", "encoders-041")
"""Few of them, for the quick tests: at most six seconds each, of tp, cp, pp, ep, fsdp and zero."""


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
    """The settings of the reference: one process, or one for each worker, everything in plain torch.

    It has one micro batch, or those of the case if they decide which choices of experts are dropped.
    """
    samples = _samples(case) if case.get("mixture") == "capacity" else BATCH // workers_of(case)
    plain = {"kernels.default": None, "trainer.micro_batch_size": samples}
    return {**_mathematics(case), "parallel.layout": "", **_values_of(case, "workers")[case["workers"]], **plain}


def workers_of(case: Mapping[str, str]) -> int:
    """The number of workers that train independently."""
    return 1 if case.get("workers", "none") == "none" else 2


def resumed_settings(case: Case, world_size: int) -> Settings:
    """The settings of the run that continues the case after its first step."""
    if case["resume"] != "as dp" or world_size == 1:
        return settings_of(case)
    alone = settings_of({**case, **dict.fromkeys(DIVISIONS, "none")})
    samples = _samples(case) if case.get("mixture") == "capacity" else BATCH // world_size
    layout = f"{alone['parallel.layout']}dp{world_size // workers_of(case)}"
    return {**alone, "parallel.layout": layout, "trainer.micro_batch_size": samples}


def _values_of(case: Case, name: str) -> dict[str, Settings]:
    """The values of a feature in the array of a case."""
    array = _ARRAY_OF.get(case["family"])
    return (array.values.get(name) if array is not None else None) or _GENERAL[name]


def _mathematics(case: Case) -> Settings:
    family = case["family"]
    array = _ARRAY_OF.get(family)
    found = dict(BASE if array is None else array.base)
    for name in (name for name in MATHEMATICS if name in case):
        if name != "mixing" or family in GENERAL or case[name] != "full":
            found |= _values_of(case, name)[case[name]]
    if not family.startswith("mixtral") or case["tied"] == "yes":
        found["model.tie_embeddings"] = case["tied"] == "yes"
    return found


def _execution(case: Case) -> Settings:
    found: Settings = {}
    replicas = ["dp4" if _is_ep_alone(case) else "dp2"]  # the ranks of experts are data-parallel ranks too
    words = replicas if _is_replicated(case) else []
    for name in (name for name in FEATURES if name in case and name not in MATHEMATICS):
        own = dict(_values_of(case, name)[case[name]])
        words.append(own.pop("parallel.layout", ""))
        found |= own
    if case["pipeline"] == HEAD_ALONE:
        taught = TEACHERS_UNITS if case["objective"] == "distill" else 0
        found["parallel.pp.split"] = [LAYERS + 1 + (case["ahead"] != "0") + taught, 1]
    return {**found, "parallel.layout": "".join(words), "trainer.micro_batch_size": _samples(case)}


def _samples(case: Mapping[str, str]) -> int:
    """Samples of a micro batch of a case."""
    ranks = 2 if case["data"] != "none" or _is_ep_alone(case) else 1
    return BATCH // workers_of(case) // (ranks * (1 + _is_replicated(case))) // int(case["micro batches"])


def _is_replicated(case: Mapping[str, str]) -> bool:
    """Whether a case has two data-parallel ranks beside its strategies, so that it can go on after a death."""
    needing = {"healed with a spare": STRATEGIES, "healed with fewer": ("workers", "data")}
    names = needing.get(case.get("resume", ""), ())
    return bool(names) and all(case.get(name, "none") == "none" for name in names)


def _is_ep_alone(case: Mapping[str, str]) -> bool:
    """Whether the ranks of experts are data-parallel ranks of the dense view, which nothing else divides."""
    divides = any(case[name] != "none" for name in ("tensor", "context"))
    return case["experts"] != "none" and case["data"] == "none" and not divides
