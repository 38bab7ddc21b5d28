"""The table of methods and features in the plugin's README is what the wraps serve."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mplug_cp.config import ContextParallelConfig
from mplug_cp.wraps import around_attention

from mplug_nn.specification import (
    CROSS,
    DOCUMENTS,
    FULL,
    KEY_LENGTH,
    KNOWN,
    POSITION_GROUPS,
    SINKS,
    SOFT_CAP,
    STATIC_KEYS,
    VALUE_WIDTH,
    WINDOW,
)
from mplug_testing.harness import tiny_run

README = Path(__file__).parents[1] / "README.md"
METHODS: dict[str, dict[str, Any]] = {
    "`ring`": {},
    "`all_gather`": {"method": "all_gather"},
    "`all_gather`, `divide=documents`": {"method": "all_gather", "divide": "documents"},
    "`ulysses`": {"method": "ulysses"},
    "`hierarchical`": {"method": "hierarchical", "ulysses_degree": 2},
}
DROPOUT = "dropout"
FEATURES = {
    "documents": DOCUMENTS,
    "attention without a causal mask": FULL,
    "windows": WINDOW,
    "attention sinks": SINKS,
    "values of another width": VALUE_WIDTH,
    "groups of positions": POSITION_GROUPS,
    "soft caps": SOFT_CAP,
    "ALiBi": "alibi bias",
    "relative biases": "relative bias",
    "attention dropout": DROPOUT,
}
OF_SAMPLING = {KEY_LENGTH, STATIC_KEYS}


def answers(method: dict[str, Any], *features: str) -> list[bool | str]:
    """What the wraps of a method say to a site with these features; wraps that are not for it are left out."""
    config = ContextParallelConfig(**method)
    run = tiny_run({"parallel.layout": "cp4", **{f"parallel.cp.{name}": value for name, value in method.items()}})
    needs = frozenset(features) - {DROPOUT} | ({DOCUMENTS} if method.get("divide") else frozenset())
    module = SimpleNamespace(dropout=0.1 if DROPOUT in features else 0.0, num_heads=4)
    site: Any = SimpleNamespace(sequence="sequence", needs=needs, module=module)
    found: list[bool | str] = []
    for wrap in around_attention(run, config):
        if wrap.slot != "Attention.core":
            continue
        answer = wrap.supports(site, run)
        if answer is True and needs - wrap.serves:
            answer = f"does not serve {sorted(needs - wrap.serves)}"
        found += [answer] if answer is not False else []
    return found


def table() -> dict[str, list[str]]:
    """The rows of the table, by feature."""
    lines = README.read_text().split("## What each method serves")[1].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    header, _, *body = rows[: 2 + len(FEATURES)]
    assert header[1:] == list(METHODS)
    return {name: cells for name, *cells in body}


def test_every_feature_of_attention_is_in_the_table() -> None:
    assert set(table()) == set(FEATURES)
    assert set(FEATURES.values()) == KNOWN - OF_SAMPLING - {CROSS} | {DROPOUT}


@pytest.mark.parametrize("feature", FEATURES)
def test_the_table_says_which_features_a_method_serves(feature: str) -> None:
    for (name, method), cell in zip(METHODS.items(), table()[feature], strict=True):
        found = answers(method, FEATURES[feature])
        assert found, f"{name} has no wrap for {feature}"
        refused = [answer for answer in found if answer is not True]
        assert cell == ("no" if refused else "yes"), f"{name}, {feature}: {refused}"


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_a_refusal_names_what_would_serve(method: str) -> None:
    for feature in ("soft caps", "ALiBi", "relative biases", "attention dropout"):
        (answer,) = answers({"method": method}, FEATURES[feature])
        assert isinstance(answer, str)
        assert "parallel.cp.method=ulysses" in answer
