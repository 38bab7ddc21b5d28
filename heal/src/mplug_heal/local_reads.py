"""Continue a run from the parts of its state on the local disks of its machines.

Each machine has the parts of its own ranks, and those of the ranks whose copies it keeps. A part is read from the disk
of its own rank, or else from a disk with its copy. The boxes then go from the ranks that have read them to those that
need them, as after a change of the layout. So a machine with an empty disk gets its parts from the others, and a run
may continue under another layout.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import safetensors

from mplug.errors import listed
from mplug.run.run import Run
from mplug_heal.live_state import LiveState, index_of
from mplug_heal.local_files import Key, Part, found_on, read_part
from mplug_heal.machines import Place, readers
from mplug_heal.parts import continue_from, merged
from mplug_heal.saying import say
from mplug_saving.boxes import plan_of
from mplug_saving.changes import FINGERPRINT, changes_on_resume, same_data
from mplug_saving.names import file_of, step_of
from mplug_saving.position import Position
from mplug_saving.rank_exchanges import at_first, from_rank


def continued(
    run: Run, position: Position, root: Path, places: Sequence[Place], newest: Path | None, allowed: tuple[str, ...]
) -> tuple[Key, str] | None:
    """Continue after the newest local checkpoint that is complete: which one, and its origin. Collective.

    None if there is none that is as new as the checkpoint `newest`, and older than the last step of the run.
    """
    disks = [place.disk for place in places]
    own = found_on(root) if disks.index(disks[run.rank]) == run.rank else {}
    announced = {disk: found for disk, found in zip(disks, run.gathered(own), strict=True) if found}
    least = 1 if newest is None else step_of(newest)
    for key in sorted({key for found in announced.values() for key in found}, reverse=True):
        if not least <= key.step < run.config.trainer.steps:
            continue
        size = max(found[key][0] for found in announced.values() if key in found)
        on = {disk: set(found[key][1]) for disk, found in announced.items() if key in found}
        read = _read(run, key, root, readers(on, disks, size), places)
        if read is not None:
            return key, _continue_from(run, position, key.folder(root), size, *read, allowed)
    return None


def _read(
    run: Run, key: Key, root: Path, sources: Mapping[int, list[int]], places: Sequence[Place]
) -> tuple[Mapping[int, Part], Mapping[int, int]] | None:
    """(the parts that this rank has read, the rank that has read each part). Collective.

    If a file is damaged, the next source is used. None if a part has none; rank 0 prints why.
    """
    own, reader, faults = dict[int, Part](), dict[int, int](), list[str]()
    waiting = sorted(sources)
    while waiting:
        lost = [part for part in waiting if not sources[part]]
        if lost:
            faults.append(f"the disks lack {_parts(lost)} of the local checkpoint of step {key.step}; it is skipped")
            break
        reader |= {part: sources[part].pop(0) for part in waiting}
        failed: dict[int, str] = {}
        for part in waiting:
            if reader[part] == run.rank:
                try:
                    own[part] = read_part(key.folder(root), part)
                except (ValueError, OSError, safetensors.SafetensorError) as error:
                    failed[part] = (
                        f"'{key.folder(root) / file_of(part)}' on {places[run.rank].host} is damaged: {error}"
                    )
        gathered = run.gathered(failed)
        waiting = sorted(part for found in gathered for part in found)
        faults += [reason for found in gathered for reason in found.values()]
    for sentence in faults:
        say(run, sentence, logging.WARNING)
    return None if waiting else (own, reader)


def _continue_from(
    run: Run,
    position: Position,
    folder: Path,
    size: int,
    own: Mapping[int, Part],
    reader: Mapping[int, int],
    allowed: tuple[str, ...],
) -> str:
    """Continue from parts that the ranks have read: their origin. Collective."""
    plans = {
        part: plan
        for found in at_first(run, {part: plan_of(one.state) for part, one in own.items()})
        for part, plan in found.items()
    }
    index, dtypes = index_of(run, size, [plans[part] for part in sorted(plans)])
    first = own.get(0)
    facts, plain = from_rank(run, reader[0], (first.facts, first.plain) if first is not None else (None, None))
    assert facts is not None
    assert plain is not None
    changes = changes_on_resume(folder, facts, run, allowed)
    same_data(folder, facts, position.facts()[FINGERPRINT], changes)
    holders = {file_of(part): rank for part, rank in reader.items()}
    live = LiveState(merged(part.state for part in own.values()), index, dtypes, dict(plain), holders)
    continue_from(run, position, live, facts["step"], [*map(dict, facts["changes"])], changes)
    others = [part for part, rank in sorted(reader.items()) if part != rank]
    return f"its local checkpoints{f', with copies of {_parts(others)} on other machines' if others else ''}"


def _parts(numbers: Sequence[int]) -> str:
    return f"the part{'s' * (len(numbers) > 1)} of rank{'s' * (len(numbers) > 1)} {listed(map(str, numbers))}"
