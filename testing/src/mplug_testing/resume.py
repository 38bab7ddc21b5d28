"""Resumes a loader under another layout, and checks that it reads what an uninterrupted run reads."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mplug.run.prepare import prepare
from mplug_testing.harness import TinySettings, tiny_config
from mplug_testing.samples import kept, merged_state, unpacked
from mplug_testing.stream_samples import watched
from mplug_testing.suite import require

if TYPE_CHECKING:
    from mplug.contracts.loader import Loader

Rows = dict[int, dict[str, Any]]
"""Sample id -> the sample's row of every entry."""


def require_exact_resume(settings: TinySettings, before: str, portions: Sequence[int], after: str, count: int) -> None:
    """Raise Fault unless a run resumes exactly: no sample is lost, repeated or changed.

    Loaders under the layout `before` read `portions` of global samples in order. New loaders under the layout `after`
    load the state that a checkpoint would hold, and read `count` more. Both layouts' numbers of data-parallel ranks
    must divide all portions. All loaders are in this process.
    """
    reference = _loaders(settings, "")
    loaders = _loaders(settings, before)
    where = f"under '{before or 'one process'}'"
    for number, portion in enumerate(portions, 1):
        _compare(_read(loaders, portion), _read(reference, portion), f"portion {number} {where}")
    state = kept(merged_state(list(loaders.values())))
    resumed = _loaders(settings, after)
    for loader in resumed.values():
        loader.load_state_dict(state)
    where = f"after {sum(portions)} samples {where}, resumed under '{after or 'one process'}'"
    _compare(_read(resumed, count), _read(reference, count), where)


def _loaders(settings: TinySettings, layout: str) -> "dict[int, Loader]":
    """One training loader for each part of the batch, as the ranks of a layout would build it."""
    from mplug.training.assembly import build_loader

    run, loaders = prepare(tiny_config({**settings, "parallel.layout": layout})), dict[int, "Loader"]()
    run.device = "cpu"
    for rank in range(run.mesh.world_size):
        part, _ = run.mesh.batch_shard(rank)
        if part not in loaders:
            loaders[part] = watched(run, build_loader(replace(run, rank=rank), "train"))
    return dict(sorted(loaders.items()))


def _read(loaders: "dict[int, Loader]", count: int) -> Rows:
    rows: Rows = {}
    for loader in loaders.values():
        for batch in loader.take(count):
            for sample in unpacked(batch):
                require(sample.number not in rows, f"sample {sample.number} is read twice")
                rows[sample.number] = dict(sample.rows)
    return rows


def _compare(found: Rows, expected: Rows, where: str) -> None:
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    require(
        not missing and not extra,
        f"{where}: the samples {missing[:5]} are missing, and the samples {extra[:5]} are read instead",
    )
    for name, row in expected.items():
        different = [key for key, values in row.items() if found[name].get(key) != values]
        require(not different, f"{where}: sample {name} has other values of {different}")
