"""Random combinations of features under random layouts, each compared with one process in fp64.

    python benchmarks/faults/random_layouts.py --first 0 --count 100 [--seconds 600]
    seq 0 50 2000 | xargs -P 16 -I {} python benchmarks/faults/random_layouts.py --first {} --count 50

Pairs of features have tests (`tests/test_pairs.py`). This script draws more at once: a family with a mixer, a mixture,
an adapter, an optimizer with groups or an average, data, an objective, recomputation, a layout, and another layout
under which the run is resumed. Some runs have the two workers of DiLoCo, and so has their reference. A case is a
function of its number. Everything is compared as in `tests/support/pair_runs.py`; a case is refused, 'ok', or printed
with its settings and its errors. The exit status is 1 if a case failed.
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")
SUPPORT = Path(__file__).parents[2] / "tests" / "support"
sys.path.insert(0, str(SUPPORT))

import torch  # noqa: E402  # it reads the variable
import yaml  # noqa: E402
from pair_features import BASE, GENERAL  # noqa: E402
from pair_runs import errors_of_workers, failures, follow_workers, run_case, worst  # noqa: E402

from mplug.errors import UsageError  # noqa: E402
from mplug.model.build import build_model  # noqa: E402
from mplug_testing.harness import tiny_run  # noqa: E402
from mplug_testing.workers import run_workers  # noqa: E402

Settings = dict[str, Any]
MOST_RANKS = 4
TABLES = yaml.safe_load((SUPPORT / "pair_features.yaml").read_text())
FEATURES: dict[str, dict[str, Settings]] = {name: one["values"] for name, one in TABLES["features"].items()}
EXPERTS = {"model.num_experts": 4, "model.num_experts_per_token": 2, "model.moe_ffn_hidden_size": 12}
SCANS = {"model.linear_num_key_heads": 2, "model.linear_key_head_dim": 6, "model.linear_value_head_dim": 8}
FAMILIES: dict[str, Settings] = FEATURES["family"] | {
    "granite": {
        "model.name": "granite",
        "model.ffn_hidden_size": 40,
        "model.mixer_types": ["mamba2", "attention"],
        "model.position_types": ["none"],
        "model.num_shared_experts": 1,
        **EXPERTS,
        **SCANS,
    },
    "nemotron": {
        "model.name": "nemotron",
        "model.num_layers": 4,
        "model.pattern": "MEM*",
        "model.moe_latent_size": 12,
        "model.num_shared_experts": 1,
        **EXPERTS,
        **SCANS,
    },
    "kimi-linear": {
        **FEATURES["family"]["deepseek"],
        "model.name": "kimi-linear",
        "model.mixer_types": ["kimi_delta", "attention"],
        "model.linear_key_head_dim": 6,
    },
    "qwen hybrid": {
        **FEATURES["family"]["qwen-experts"],
        "model.mixer_types": ["gated_delta", "attention"],
        "model.attention_output_gate": True,
        **SCANS,
    },
}
MIXTURES: list[Settings] = [
    {},
    *FEATURES["mixture"].values(),
    {"model.expert_bias_rate": 0.01},
    {"model.num_shared_experts": 1},
    {"model.aux_loss_coefficient": 0.05, "model.capacity_factor": 1.5},
    *(
        {"model.moe_balance": balance, "model.aux_loss_coefficient": 0.05}
        for balance in ("sequence", "micro_batch", "global_batch")
    ),
]
RATE: Settings = {"optimizer.lr": 1e-3}
ADAMW: Settings = {**RATE, "optimizer.name": "adamw", "optimizer.eps": 1e-3}
MUON: Settings = {**RATE, "optimizer.name": "muon", "optimizer.adamw_eps": 1e-3}
OF_MUON = {"name": "muon", "adamw_eps": 1e-3}
OPTIMIZERS: list[Settings] = [
    *FEATURES["optimizer"].values(),
    {**MUON, "optimizer.average": {"decay": None}},
    {**RATE, "optimizer.name": "soap", "optimizer.eps": 1e-3, "optimizer.average": {"decay": 0.5}},
    {**RATE, "optimizer.name": "adafactor", "optimizer.eps": 1e-6, "optimizer.average": {"decay": 0.5, "start": 1}},
    {
        **ADAMW,
        "optimizer.groups": [{"match": "blocks.1", "optimizer": OF_MUON}, {"match": "embedding", "lr_scale": 0.1}],
    },
    {**ADAMW, "optimizer.groups": [{"match": "blocks.0", "optimizer": {"name": "schedulefree", "eps": 1e-3}}]},
    {
        **ADAMW,
        "optimizer.moments": "8bit",
        "optimizer.groups": [{"match": "blocks.2", "optimizer": {"name": "adafactor", "eps": 1e-6}}],
    },
]
DATA: list[Settings] = [{}, {"data.documents": 3}, {"data.documents": 5, "data.loss_weights": True}]
OBJECTIVES: list[Settings] = [{}] * 6 + [
    {
        **one,
        **({"objectives.classify.labels": [*map(str, range(BASE["model.vocab_size"]))]} if name == "classify" else {}),
    }
    for name, one in FEATURES["objective"].items()
]
WORKERS: Settings = FEATURES["workers"]["diloco2"]


def case(number: int) -> tuple[str, Settings, Settings, Settings]:
    """(family, the reference's settings, those of the case, those of the run that resumes it)."""
    draw = random.Random(number)
    array = draw.choices(["", *TABLES["arrays"]], [14, *[2] * len(TABLES["arrays"])])[0]
    name, found = _of_array(draw, array) if array else _of_families(draw)
    found |= draw.choice(OPTIMIZERS)
    found |= {"trainer.max_grad_norm": draw.choice([1.0, 0.05]), "optimizer.weight_decay": draw.choice([0.0, 0.3])}
    execution = draw.choice([{}, *FEATURES["recompute"].values()])
    execution |= {"kernels.default": draw.choice(["reference", "sdpa", None])}
    execution |= draw.choice([*FEATURES["reading"].values()])
    workers = WORKERS if draw.random() < 0.1 else {}
    own, again = (
        {
            **found,
            **execution,
            **workers,
            **_layout(draw, found, array, workers),
            "trainer.micro_batch_size": draw.choice([1, 2, 4]),
            **({"parallel.balance": draw.random() < 0.5} if array == "seeing" else {}),
        }
        for _ in range(2)
    )
    by_micro_batch = "model.capacity_factor" in found or found.get("model.moe_balance") == "micro_batch"
    of_worker = BASE["trainer.global_batch_size"] // (1 + bool(workers))
    whole = own["trainer.micro_batch_size"] if by_micro_batch else of_worker
    plain = {"parallel.layout": "", **workers, "kernels.default": None, "trainer.micro_batch_size": whole}
    return name, {**found, **plain}, own, own if by_micro_batch or draw.random() < 0.4 else again


def _of_families(draw: random.Random) -> tuple[str, Settings]:
    name = draw.choice(sorted(FAMILIES))
    found = {**BASE, **FAMILIES[name]}
    if name in GENERAL and draw.random() < 0.5:
        found |= draw.choice([*FEATURES["mixing"].values()])
    if "model.num_experts" in found:
        found |= draw.choice(MIXTURES)
    if not name.startswith(("gpt", "mixtral")) and draw.random() < 0.25:
        found["model.num_mtp_layers"] = draw.choice([1, 2])
    if draw.random() < 0.4:
        found["model.tie_embeddings"] = True
    changes = [one for feature in ("adapter", "frozen") for one in FEATURES[feature].values()]
    return name, found | draw.choice(DATA) | draw.choice(OBJECTIVES) | draw.choice([{}, {}, *changes])


def _of_array(draw: random.Random, array: str) -> tuple[str, Settings]:
    table = TABLES["arrays"][array]
    found = {name: value for name, value in BASE.items() if name not in table.get("without", ())} | table["settings"]
    for feature, one in table["features"].items():
        if feature not in ("data", "context"):
            found |= draw.choice([*one["values"].values()])
    if array == "seeing":
        found |= draw.choice(DATA[:2])
    return array, found


def _layout(draw: random.Random, settings: Settings, array: str, workers: Settings) -> Settings:
    """One or two strategies with their options, beside the workers."""
    names = ["data", "tensor", "context", "pipeline", *(["experts"] if "model.num_experts" in settings else [])]
    own = TABLES["arrays"][array]["features"] if array == "packed" else {}
    words, options = workers.get("parallel.layout", ""), Settings()
    for name in draw.sample(names, 1 if workers else draw.choice([1, 2, 2])):
        values = own[name]["values"] if name in own else FEATURES[name]
        chosen = dict(draw.choice([*values.values()][1:]))
        words += chosen.pop("parallel.layout")
        options |= chosen
    return {**options, "parallel.layout": words}


def world_size(settings: Settings) -> int:
    """The ranks of a run; UsageError if mplug refuses it."""
    with patch("mplug_estimates.unmet.kernels_that_would_do", return_value=""):
        run = tiny_run(settings)
        build_model(run)
    return run.mesh.world_size


def outcome(number: int) -> tuple[str, Sequence[str]]:
    """(a word with the case, its failures)."""
    name, reference, own, again = case(number)
    layouts = f"{own['parallel.layout']} -> {again['parallel.layout']}"
    try:
        ranks = world_size(own)
        world_size(reference)
    except UsageError as error:
        return f"refused {number} {name} {layouts}: {str(error).splitlines()[0][:120]}", ()
    if ranks > MOST_RANKS:
        return f"skipped {number} {name} {layouts}: {ranks} ranks", ()
    try:
        again = again if world_size(again) == ranks else own
    except UsageError:
        again = own
    folder = Path(tempfile.mkdtemp(prefix="random-layout-"))
    try:
        expected = follow_workers(1 + ("diloco" in own["parallel.layout"]), reference, folder / "reference")
        traces = run_workers(ranks, run_case, own, again, str(folder), None, timeout=300)
        parts = ("", [one[0] for one in traces]), ("resumed: ", [one[1] for one in traces])
        largest = [(part, worst(errors_of_workers(traced, expected))) for part, traced in parts]
        found = [f"{part}{one}" for part, errors in largest for one in failures(errors)]
    except Exception:
        found = [traceback.format_exc()[-3000:]]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if found:
        found += [
            f"settings: { {key: value for key, value in own.items() if BASE.get(key) != value} }",
            f"resumed with: { {key: value for key, value in again.items() if own.get(key) != value} }",
        ]
    return f"{'FAILED' if found else 'ok'} {number} {name} {layouts}", found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--count", type=int, default=50, help="number of cases")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after this time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    began, failed = time.monotonic(), 0
    for number in range(options.first, options.first + options.count):
        if time.monotonic() - began > options.seconds:
            break
        line, found = outcome(number)
        print("\n    ".join((line, *found)), flush=True)
        failed += bool(found)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
