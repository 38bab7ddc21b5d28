"""Checks of a layout without processes: what each rank would compute, and what must hold for all ranks together.

Every check raises `Fault`. Its message names the fault of the layout.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mplug.errors import UsageError, listed
from mplug.layout.mesh import Axis, IndexMap
from mplug.layout.ownership import FlatBox
from mplug.model.slots.offers import Offer, Site, Wrap
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug_testing.harness import TinySettings, tiny_config
from mplug_testing.suite import Fault, require

if TYPE_CHECKING:
    from mplug.layout.placement import Box, Placement
    from mplug.model.model import Model

Ranks = list[tuple[Run, "Model"]]
"""Every rank's run, with the rank's model."""

Tokens = dict[tuple[int, int], tuple[int, int]]
"""(sample, position) -> (token, label)."""


@contextmanager
def errors_as_faults(action: str) -> Iterator[None]:
    """Turn any exception in the block, except a refusal, into a Fault whose message begins with `action`."""
    try:
        yield
    except (UsageError, Fault):
        raise
    except Exception as error:
        raise Fault(f"{action} raises {type(error).__name__}: {error}") from error


def prepared(settings: TinySettings) -> Run:
    """A prepared tiny run; UsageError if it is refused."""
    config = tiny_config(settings)
    with errors_as_faults("checking the config and laying out the mesh"):
        return prepare(config)


def ranks_of(settings: TinySettings) -> Ranks:
    """Every rank of a run with its model, without processes; UsageError if the run is refused before launch.

    Before a launch the host builds only rank 0's model, and fills the slots of stages with other blocks. So any other
    refusal by another rank comes too late, and is a Fault.
    """
    from mplug.model.build import build_model  # imports torch

    run, ranks = prepared(settings), []
    for rank in range(run.mesh.world_size):
        own = replace(run, rank=rank)
        try:
            with errors_as_faults(f"building rank {rank} without processes, from run.mesh and the plan alone,"):
                ranks.append((own, build_model(own)))
        except UsageError as error:
            if rank == 0:
                raise
            raise Fault(
                f"rank {rank} is refused and rank 0 is not, and before launch the host builds rank 0's model and fills "
                f"the slots of stages with other blocks: {error}"
            ) from error
    return ranks


# Axes.


def axes_of(run: Run, label: str) -> list[Axis]:
    """The axes that one plugin adds to the mesh."""
    by_plugin: dict[str, Any] = dict(run.hooks.each("mesh_axes", config=run.config))
    axes: list[Axis] = by_plugin.get(label, [])
    sound = isinstance(axes, list) and axes and all(isinstance(axis, Axis) for axis in axes)
    require(sound, f"mesh_axes of {label} returns {axes!r}; it must return a list of the axes that it adds")
    return axes


def comparable(axis: Axis) -> tuple[object, ...]:
    """An axis as values that can be compared; an index map is represented by its results."""
    length = 8 * axis.size
    parts = {named: [_part(cut, length, axis.size, n) for n in range(axis.size)] for named, cut in axis.entries.items()}
    return axis.name, axis.size, axis.splits, parts, axis.activations, axis.distance, axis.views


def require_partition(axis: Axis) -> None:
    """Each index map assigns every index of a dimension to exactly one rank, or refuses the dimension's length."""
    for named, cut in axis.entries.items():
        name = f"the index map of axis '{axis.name}' along '{named}'"
        lengths = [axis.size * factor for factor in (1, 2, 4, 2 * axis.size)] + [2 * axis.size + 1]
        cuts = {length: [_part(cut, length, axis.size, n) for n in range(axis.size)] for length in lengths}
        require(
            any(None not in parts for parts in cuts.values()),
            f"{name} refuses all the lengths {listed(map(str, cuts))}",
        )
        for length, parts in cuts.items():
            assigned = sorted(index for part in parts if part is not None for index in part)
            if None in parts or assigned == list(range(length)):
                continue
            counts = {index: assigned.count(index) for index in (*range(length), *assigned)}
            index = next(index for index, count in counts.items() if count != 1 or not 0 <= index < length)
            raise Fault(
                f"{name} assigns index {index} of {length} to {counts[index]} of {axis.size} ranks; it must assign "
                f"each index to one rank"
            )


def _part(cut: IndexMap, length: int, size: int, index: int) -> list[int] | None:
    """The indices that a rank gets, or None if the map refuses the length."""
    try:
        with errors_as_faults(f"the index map of {length} indices for {size} ranks"):
            return [index for part in cut(length, size, index) for index in part]
    except UsageError:
        return None


# Placements.


def require_sound_placements(ranks: Ranks) -> None:
    """Every rank computes the same placements, and they cover every parameter."""
    require_one_truth(ranks)
    for placement in ranks[0][1].placements.values():
        require_exact_cover(placement)


def require_exact_cover(placement: "Placement") -> None:
    """Each element of the parameter is in exactly one box, and all holders of a box agree about its holders."""
    import torch

    holders: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, Box]]] = {}
    for rank in range(placement.mesh.world_size):
        for box in placement.boxes(rank):
            holders.setdefault((box.start, box.shape), []).append((rank, box))
            _require_room(placement, rank, box)
    covered = torch.zeros(placement.shape, dtype=torch.int64)
    for (start, shape), held in holders.items():
        _require_agreement(placement.name, dict(held))
        covered[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))] += 1
    wrong = (covered != 1).nonzero().tolist()
    if wrong:
        count = int(covered[tuple(wrong[0])])
        holder = "no box" if count == 0 else f"{count} different boxes"
        raise Fault(f"element {wrong[0]} of '{placement.name}' is in {holder}; every element must be in one box")


def _require_room(placement: "Placement", rank: int, box: "Box") -> None:
    local = placement.local_shape(rank)
    if isinstance(box, FlatBox):
        last = box.offset[0] + sum((n - 1) * stride for n, stride in zip(box.shape, box.strides, strict=True))
        fits = last < local[0]
    else:
        fits = all(o + n <= size for o, n, size in zip(box.offset, box.shape, local, strict=True))
    require(
        fits,
        f"rank {rank} holds a box of shape {box.shape} of '{placement.name}' at offset {box.offset}, which exceeds its "
        f"tensor of shape {local}",
    )


def _require_agreement(name: str, boxes: "dict[int, Box]") -> None:
    ranks = tuple(boxes)
    for rank, box in boxes.items():
        statement, copies, partial = f"rank {rank} states that a box of '{name}'", tuple(box.copies), tuple(box.partial)
        require(copies == ranks, f"{statement} is held by ranks {copies}; it is held by ranks {ranks}")
        partners = {boxes[other].partial for other in partial if other in boxes}
        agreed = rank in partial and partners == {box.partial} and set(partial) <= set(ranks)
        require(agreed, f"{statement} is partial over ranks {partial}, and these ranks state otherwise")


def require_one_truth(ranks: Ranks) -> None:
    """Every rank computes the same placements for all ranks."""
    tables = []
    for run, model in ranks:
        everyone = range(run.mesh.world_size)
        tables.append({name: [one.boxes(rank) for rank in everyone] for name, one in model.placements.items()})
    for rank, table in enumerate(tables):
        for name in {**tables[0], **table}:
            require(
                table.get(name) == tables[0].get(name),
                f"ranks 0 and {rank} compute different placements of '{name}'; a placement must depend on the plan and "
                f"the mesh only",
            )


# Batches.


def tokens_of(run: Run, model: "Model") -> Tokens:
    """The tokens and labels of the next global batch with which a rank computes."""
    from mplug.training.assembly import build_loader
    from mplug.training.batch_parts import own_part

    found: Tokens = {}
    for batch in build_loader(run, "train").take(run.config.trainer.global_batch_size):
        own = own_part(batch, model.plan, run.mesh, run.rank)
        positions = own["positions"].expand_as(own["tokens"])
        for row, sample in enumerate(own["sample_ids"].tolist()):
            columns = (own[name][row].tolist() for name in ("tokens", "labels"))
            read = zip(*columns, strict=True)
            found |= zip(((sample, position) for position in positions[row].tolist()), read, strict=True)
    return found


def require_every_token_once(ranks: Ranks, whole: Tokens) -> None:
    """The ranks together read every token of the batch once.

    Ranks that differ along an axis of batch entries read different tokens; all others read the same tokens.
    """
    parts: dict[tuple[int, ...], tuple[int, Tokens]] = {}
    for run, model in ranks:
        place = run.mesh.coordinates(run.rank)
        key = tuple(place[axis.name] for axis in run.mesh.views["dense"] if axis.entries)
        first, tokens = parts.setdefault(key, (run.rank, tokens_of(run, model)))
        if first != run.rank:
            same = tokens == tokens_of(run, model)
            require(
                same,
                f"ranks {first} and {run.rank} read different tokens, and no axis of batch entries distinguishes them",
            )
    for sample, position in whole:
        found = [(rank, tokens[sample, position]) for rank, tokens in parts.values() if (sample, position) in tokens]
        token = f"the token at position {position} of sample {sample}"
        readers = f"ranks {listed(str(rank) for rank, _ in found)}" if found else "no rank"
        require(len(found) == 1, f"{token} is read by {readers}; exactly one part of the batch must have it")
        require(found[0][1] == whole[sample, position], f"{token}, or its label, differs from the run of one process")


# Offers.


def offers_of(run: Run, model: "Model", label: str) -> list[Offer | Wrap]:
    """The offers of one plugin."""
    return next((list(answer) for name, answer in run.hooks.each("offer", run=run, model=model) if name == label), [])


def require_pure_offers(run: Run, model: "Model", label: str) -> None:
    """Two calls of `offer` return the same, and change nothing in the model."""
    before = _state_of(model)
    first, second = (offers_of(run, model, label) for _ in range(2))
    same = _descriptions(first) == _descriptions(second)
    require(
        same,
        f"`offer` returns {_descriptions(first)} at the first call and {_descriptions(second)} at the second; it must "
        f"be a pure function",
    )
    changed = [name for name, value in _state_of(model).items() if before.get(name) is not value]
    require(not changed, f"`offer` changes {listed(sorted(changed))}; it must change nothing: the host applies offers")


def _state_of(model: "Model") -> dict[str, object]:
    from mplug.model.slots.fill import sites

    slots = {f"{s.slot} of '{s.name}'": getattr(s.module, s.slot.rpartition(".")[2]) for s in sites(model.module)}
    return {
        **slots,
        **dict(model.module.named_parameters()),
        **{f"the placement of '{n}'": p for n, p in model.placements.items()},
    }


def _slots(offered: Offer | Wrap) -> tuple[str, ...]:
    return tuple(offered.suppliers) if isinstance(offered, Offer) else (offered.slot,)


def _descriptions(offered: list[Offer | Wrap]) -> list[str]:
    layers = [f" at layer {offer.layer}" if isinstance(offer, Wrap) else "" for offer in offered]
    return [
        f"{type(offer).__name__} for {listed(_slots(offer))}{layer}"
        for offer, layer in zip(offered, layers, strict=True)
    ]


def require_true_offers(run: Run, model: "Model", label: str) -> None:
    """Each offer answers for every site of its slots with True, False or a reason."""
    from mplug.model.slots.fill import sites_of

    for offered in offers_of(run, model, label):
        for site in (site for site in sites_of(model) if site.slot in _slots(offered)):
            _require_answers(offered, site, run)


def _require_answers(offered: Offer | Wrap, site: Site, run: Run) -> None:
    name = f"{site.slot} of '{site.name}'"
    with errors_as_faults(f"`supports` for {name}"):
        answer = offered.answer(site, run)
    require(
        isinstance(answer, bool) or (isinstance(answer, str) and answer.strip()),
        f"`supports` for {name} returns {answer!r}; it must return True, False or a reason",
    )
    if isinstance(offered, Wrap) and answer is True:
        inner = getattr(site.module, site.slot.rpartition(".")[2])
        with errors_as_faults(f"the wrap of {name}"):
            twice = offered.wrap(offered.wrap(inner))
        fits = callable(twice) or type(twice) is type(inner)
        require(fits, f"the wrap of {name} returns {twice!r}, which cannot fill the slot")


def require_one_callable_a_role(model: "Model", label: str) -> None:
    """A plugin fills all sites of a role with one callable: one per site would be compiled once per site."""
    found: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for filled in model.slots:
        own = [filled.offer.suppliers[filled.site.slot]] if filled.offer and filled.offer.plugin == label else []
        own += [wrap.wrap for wrap in filled.wraps if wrap.plugin == label]
        found.setdefault((filled.site.role, filled.site.slot), set()).add(tuple(map(id, own)))
    for (role, slot), different in found.items():
        require(
            len(different) == 1,
            f"the sites of '{role}' get {len(different)} different callables for {slot}; offer one callable for all "
            f"of them",
        )
