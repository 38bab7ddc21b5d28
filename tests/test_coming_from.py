"""The pages for people who come from another trainer: what they say of mplug's own options and fields is true."""

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from page_commands import changed_by, parsed
from pydantic import TypeAdapter, ValidationError

from mplug.config.binding import HOST_SECTIONS
from mplug.config.defaults import default_settings
from mplug.config.host_sections import Model, Optimizer
from mplug.registry.entry_points import Registry
from mplug.registry.rates import RATES
from mplug.registry.resolve import resolve

DOCS = Path(__file__).parent.parent / "docs"
NAMES = ("from-megatron", "from-torchtitan", "from-axolotl")
ABSENT = ("not there", "always")
"""What the second column says where no option and no field exists."""
FLAGS = """
tensor-model-parallel-size sequence-parallel tp-comm-overlap tensor-parallel-num-weight-shards
pipeline-model-parallel-size pipeline-model-parallel-layout num-layers-per-virtual-pipeline-stage
context-parallel-size cp-comm-type hierarchical-context-parallel-sizes hybrid-context-parallel
expert-model-parallel-size expert-tensor-parallel-size moe-router-topk moe-router-load-balancing-type
moe-z-loss-coeff moe-expert-capacity-factor moe-token-dispatcher-type moe-grouped-gemm moe-latent-size
moe-use-upcycling overlap-moe-expert-parallel-comm use-distributed-optimizer overlap-grad-reduce overlap-param-gather
use-megatron-fsdp data-parallel-sharding-strategy hybrid-layer-pattern multi-latent-attention mtp-num-layers
fp8-format fp8-recipe fp4-format fp8-param-gather first-last-layers-bf16 recompute-granularity recompute-modules
fine-grained-activation-offloading optimizer-cpu-offload use-precision-aware-optimizer cuda-graph-impl data-path split
sft fim-data optimizer lr-decay-style rampup-batch-size qk-clip ckpt-format async-save inprocess-restart rerun-mode
log-straggler exit-signal-handler exit-duration-in-mins log-throughput
"""
"""Flags of Megatron-LM for each of its features."""


def rows(name: str) -> list[tuple[str, str]]:
    """The first two cells of each row of a page's tables."""
    lines = [line for line in (DOCS / f"{name}.md").read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(row[0], row[1]) for row in cells if row[1] != "mplug" and not row[0].startswith("---")]


CLAIMS = sorted({(name, ours) for name in NAMES for _, ours in rows(name)})


@cache
def fields_of(kind: str, word: str | None = None) -> dict[str, Any]:
    """The fields of the plugin `word`, or of all plugins of a kind, with their types."""
    registry = Registry()
    found: dict[str, Any] = {}
    for name in [word] if word else registry.names(kind):
        config = getattr(registry.load(registry.find(kind, name)), "Config", None)
        found |= {field: info.rebuild_annotation() for field, info in getattr(config, "model_fields", {}).items()}
    return found


HOST = {**HOST_SECTIONS, "model": Model, "optimizer": Optimizer}
"""The fields of the host."""
PLUGINS = {"model": "models", "optimizer": "optimizers", "data": "data"}
KINDS = {"parallel": "parallel", "kernels": "kernels", "memory": "memory", "adapters": "adapters"}
KINDS |= {"extensions": "extensions", "objectives": "objectives", "precisions": "precisions"}


def check_field(text: str) -> None:
    """A field 'a.b' or 'a.b=value' exists, and accepts the value."""
    field, equals, value = text.partition("=")
    section, *path = field.split(".")
    if section in KINDS and value == "{}":
        assert path[0] in Registry().names(KINDS[section]), f"there is no plugin '{path[0]}'"
        return
    if section in KINDS and len(path) == 2:
        found = fields_of(KINDS[section], path[0])
    elif section in PLUGINS and path[0] in fields_of(PLUGINS[section]):
        found = fields_of(PLUGINS[section])
    else:
        schema: Any = HOST[section]
        for word in path[:-1]:
            schema = schema.model_fields[word].annotation
        found = {name: info.rebuild_annotation() for name, info in schema.model_fields.items()}
    assert path[-1] in found, f"there is no field '{field}'"
    if equals:
        TypeAdapter(found[path[-1]]).validate_python(yaml.safe_load(value))
        assert field != "schedule.name" or value in RATES.names()


NEEDED = {
    "--model llava": "--preset tiny",
    "--model qwen-vl": "--preset tiny",
    "--preset 3": "--model llama",
    "--data indexed": "--set data.path=corpus",
    "--data packed": "--set data.path=x",
    "--objective grpo --data rollouts": "--set data.path=x --set data.rewards=[rewarding:length]",
}
"""What some options need beside them."""


def check(text: str) -> None:
    """A command, an option of `mplug train`, or a field."""
    if text.startswith("mplug "):
        parsed(tuple(shlex.split(text)[1:]))
    elif text.startswith("--"):
        further = [words for option, words in NEEDED.items() if text.startswith(option)]
        changed = changed_by(parsed(("train", *shlex.split(" ".join([text, *further])))))
        assert changed is not None
        if text not in ("--resume", "--config run.yaml", "--data energon"):
            resolve(Registry(), default_settings(), changed)
    else:
        check_field(text)


@pytest.mark.parametrize(("page", "ours"), CLAIMS, ids=lambda part: part.replace("`", ""))
def test_what_a_page_names_exists_and_accepts_its_value(
    page: str, ours: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "run.yaml").touch()
    monkeypatch.chdir(tmp_path)
    named = re.findall(r"`([^`]+)`", ours)
    assert ours in ABSENT or named, ours
    assert re.sub(r"`[^`]+`|,| ", "", ours) == ("" if named else ours.replace(" ", "")), ours
    for text in named:
        check(text)


@pytest.mark.parametrize("name", NAMES)
def test_no_row_of_a_page_is_there_twice(name: str) -> None:
    theirs = [cell for cell, _ in rows(name)]
    assert len(theirs) > 50
    assert [cell for cell in theirs if theirs.count(cell) > 1] == []


def test_the_page_for_megatron_has_a_flag_of_every_feature() -> None:
    named = {flag for theirs, _ in rows("from-megatron") for flag in re.findall(r"`--([a-z0-9-]+)", theirs)}
    assert {*FLAGS.split()} - named == set()


@pytest.mark.parametrize(
    "text", ["parallel.pp.shedule", "model.layers", "trainer.stpes", "parallel.cp.method=rings", "schedule.name=cosin"]
)
def test_the_check_finds_fields_and_values_that_do_not_exist(text: str) -> None:
    with pytest.raises((AssertionError, ValidationError)):
        check_field(text)
