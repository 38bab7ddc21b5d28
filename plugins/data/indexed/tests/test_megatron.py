"""Megatron Core's files, indices, blends and samples, as `benchmarks/megatron_data.py compare --record` found them."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mplug_indexed.files import Reader, Writer, bin_path, idx_path
from mplug_indexed.indices import Cut, build_blend, build_indices, normalize, total

ROOT = Path(__file__).parents[4]
RECORDED = json.loads(Path(__file__).with_name("megatron.json").read_text())


def _benchmark() -> Any:
    """The script that made the record: how its cases are made is written there only."""
    spec = importlib.util.spec_from_file_location("megatron_data", ROOT / "benchmarks" / "megatron_data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BENCHMARK = _benchmark()


def test_the_recorded_cases_cover_every_rule() -> None:
    cases = RECORDED["indices"]
    assert len(cases) == 1000
    assert sum(case["before_last"] is not None for case in cases) > 100
    for name, values in {"extra": {0, 1}, "keep_rest": {False, True}, "seq_length": {1, 2, 7, 16, 64}}.items():
        assert {case[name] for case in cases} == values


def test_the_three_indices_of_a_thousand_cases_are_those_of_megatron() -> None:
    for case in RECORDED["indices"]:
        lengths = BENCHMARK.lengths_of(case)
        sequences = range(case["first"], len(lengths))
        cut = Cut(case["seq_length"], case["extra"], case["keep_rest"])
        epochs = cut.epochs(total(lengths, sequences), case["samples"])
        found = build_indices(lengths, sequences, cut, epochs, case["seed"])
        assert BENCHMARK.hashed(*found) == case["indices"], case


def test_samples_are_those_of_megatron(tmp_path: Path) -> None:
    """Tokens, labels with every mask, and positions that begin anew with each document."""
    cases = [case for case in RECORDED["indices"] if "read" in case]
    assert len(cases) > 30
    for case in cases:
        prefix = BENCHMARK.write_case(tmp_path / str(case["seed"]), case)
        loader = BENCHMARK.our_loader(prefix, case, case["samples"], tmp_path / "cache")
        assert BENCHMARK.hashed(*BENCHMARK.our_samples(loader)) == case["read"], case


@pytest.mark.parametrize("case", RECORDED["files"], ids=lambda case: case["dtype"])
def test_files_are_those_of_megatron_byte_for_byte(tmp_path: Path, case: dict[str, Any]) -> None:
    lengths = BENCHMARK.lengths_of({**BENCHMARK.draw_case(case["seed"]), "documents": 60, "longest": 30, "empty": 0.3})
    tokens = np.random.default_rng(case["seed"]).integers(0, 100, lengths.sum()).astype(case["dtype"])
    with Writer(tmp_path / "c", case["dtype"]) as writer:
        for document in np.split(tokens, np.cumsum(lengths)[:-1]):
            writer.add_document(document, [len(document) // 3, len(document) - len(document) // 3])
    files = [np.frombuffer(path(tmp_path / "c").read_bytes(), dtype=np.uint8) for path in (bin_path, idx_path)]
    assert BENCHMARK.hashed(*files) == case["files"]
    Reader(tmp_path / "c").verify()


def test_blends_are_those_of_megatron() -> None:
    for case in RECORDED["blends"]:
        weights, capacities = case["weights"], case["weights"] if case["exhaustive"] else None
        once = normalize(weights)
        found, given = build_blend(once if case["exhaustive"] else normalize(once), case["size"], capacities)
        assert BENCHMARK.hashed(*found) == case["blend"], case
        assert given == np.bincount(found.which, minlength=len(weights)).tolist()
