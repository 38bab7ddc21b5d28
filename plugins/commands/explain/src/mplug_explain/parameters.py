"""The tables of `mplug explain` about parameters: their placements, what ranks gather of them, their sharded states."""

from collections import Counter
from math import prod
from typing import TYPE_CHECKING

from mplug.commands import role_of, table
from mplug_explain.updates import rates

if TYPE_CHECKING:
    from mplug import Model, Run


def placements(run: "Run", model: "Model", rank: int) -> str:
    """A table of the parameters of all ranks: what this rank holds of each, and its rates."""
    from mplug_updates import width_rates  # imports torch

    rows = []
    trained = {name: placement.parameter.trainable for name, placement in model.placements.items()}
    alike: dict[tuple[str, bool, int], list[str]] = {}
    factors = width_rates(run, model) if run.trains else {}
    for role, names in grouped(list(trained)).items():
        for name in sorted(names, key=lambda name: not trained[name]):
            alike.setdefault((role, trained[name], model.groups.get(name, -1)), []).append(name)
    for (role, _, group), names in alike.items():
        held = [name for name in names if model.placements[name].boxes(rank)]
        placement = model.placements[held[0] if held else names[0]]
        boxes = placement.boxes(rank)
        named = " x ".join("+".join(segment.axis for segment in dim) for dim in placement.dims)
        rows.append(
            (
                role,
                len(held) if len(held) == len(names) else f"{len(held)} of {len(names)}",
                by(placement.shape),
                named,
                by(placement.local_shape(rank)) if boxes else "-",
                len(boxes),
                len(boxes[0].copies) if boxes else 0,
                "frozen" if not placement.parameter.trainable else len(boxes[0].partial) if boxes else 0,
                rates(run, group, factors.get(names[0], 1.0)),
            )
        )
    header = ("PARAMETER", "COUNT", "SHAPE", "AXES", "LOCAL", "BOXES", "COPIES", "PARTIAL OVER", "RATES")
    kept = len(header) if run.config.groups or factors else -1
    return table(header[:kept], [row[:kept] for row in rows])


def gathered(run: "Run", model: "Model") -> str:
    """A table of the parameters that ranks gather for each pass: in which form, and the bytes that a rank sends."""
    from mplug_products import GatheredCopies, gathered_copies
    from mplug_sharding import GatheredPlacement  # imports torch

    groups, sent = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    copies, itemsize = gathered_copies(run, model), run.precision.weight_dtype.itemsize
    for name in model.parameters():
        placement = model.placements[name]
        if not isinstance(placement, GatheredPlacement):
            continue
        found = copies.get(name, "-")
        if isinstance(found, GatheredCopies):
            formats = dict.fromkeys(str(one.dtype).removeprefix("torch.") for one in found.like)
            form, reason, num_bytes = f"{found.supplier}: {', '.join(formats)}", "-", found.part_bytes
        else:
            form, reason = run.precision.weights, found
            num_bytes = placement.rows_each * prod(placement.gathered_shape(run.rank)[1:]) * itemsize
        key = (role_of(name), placement.axis, form, reason)
        groups[key] += 1
        sent[key] += num_bytes
    rows = [(key[0], n, *key[1:3], f"{sent[key]:,}", key[3]) for key, n in groups.items()]
    header = ("PARAMETER", "COUNT", "ALONG", "AS", "BYTES SENT BY A RANK", "WHY NOT AS COPIES")
    return table(header, rows) if rows else ""


def is_sharded(model: "Model") -> bool:
    """Whether this rank has buckets; a frozen stage has none."""
    return model.sharding is not None and bool(model.sharding.buckets)


def shards(model: "Model") -> str:
    """A table of the sharded optimizer state: for each set of axes, the buckets and this rank's elements."""
    assert model.sharding is not None
    rows = []
    for axes, copied in dict.fromkeys((bucket.axes, bucket.copied) for bucket in model.sharding.buckets):
        buckets = [bucket for bucket in model.sharding.buckets if (bucket.axes, bucket.copied) == (axes, copied)]
        own = sum(bucket.num_owned for bucket in buckets)
        names, elements = sum(len(bucket.names) for bucket in buckets), sum(bucket.length for bucket in buckets)
        counts = (len(buckets), names, f"{elements:,}")
        rows.append((", ".join(axes), ", ".join(copied) or "-", *counts, f"{own:,}"))
    return table(("OVER", "COPIES OVER", "BUCKETS", "PARAMETERS", "ELEMENTS", "LOCAL"), rows)


def grouped(names: list[str]) -> dict[str, list[str]]:
    """Names by their role: 'blocks.*.attn'."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(role_of(name), []).append(name)
    return groups


def by(shape: tuple[int, ...]) -> str:
    """A shape: '4x8'."""
    return "x".join(map(str, shape))
