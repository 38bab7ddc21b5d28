"""A checkpoint that all ranks open together: one rank reads and validates its manifest, and informs the others.

Ten thousand ranks would otherwise read and validate the same manifest, and look at ten thousand files each.
"""

import json
import socket
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mplug.errors import RunError, UsageError
from mplug.run.launching import launched
from mplug.run.run import Run
from mplug_saving.folder import REMEDY, checksum_of_manifest, read_with_checksum
from mplug_saving.index import Index
from mplug_saving.rank_exchanges import divided, from_rank, raise_alike

if TYPE_CHECKING:
    from mplug_saving.manifest import Contents, Facts, Manifest


@dataclass(frozen=True)
class Opened:
    """What a rank knows of a checkpoint that rank 0 has read and validated.

    `share` has the manifest's entries of the files that this rank compares with their checksums: together, the ranks
    have all files. `checksum` is the CRC-32 of the manifest's text.
    """

    path: Path
    facts: "Facts"
    index: Index
    checksum: int
    share: "Contents"


def open_together(run: Run, path: Path) -> Opened:
    """Open a checkpoint. Collective: if one rank cannot read it, or finds it damaged, all ranks raise the error.

    Raises RunError if a machine sees another checkpoint at `path` than rank 0 does.
    """
    common: tuple[Any, Index, int] | None = None
    shares, error = list[bytes](), None
    if run.rank == 0:
        try:
            manifest, checksum = read_with_checksum(path)
            common, shares = (_facts(manifest), Index.of(manifest), checksum), _shares(manifest, run.mesh.world_size)
        except (UsageError, RunError) as raised:
            error = raised
    raise_alike(run, error)
    common = from_rank(run, 0, common)
    assert common is not None
    share: Contents = json.loads(zlib.decompress(divided(run, shares)))
    opened = Opened(path, *common, share)
    raise_alike(run, _difference(run, opened))
    return opened


def _facts(manifest: "Manifest") -> "Facts":
    facts: Any = {name: value for name, value in manifest.items() if name not in ("files", "tensors")}
    return cast("Facts", facts)


def _shares(manifest: "Manifest", num_ranks: int) -> list[bytes]:
    """For each rank, the compressed entries of the files that it compares with their checksums."""
    from mplug_saving.manifest import contents_by_rank  # imports pydantic

    return [zlib.compress(json.dumps(part).encode(), 1) for part in contents_by_rank(manifest, num_ranks)]


def _fault_of_own(opened: Opened) -> UsageError | RunError | None:
    """Why this machine, which has a folder of its own, lacks the checkpoint or a file of it: another one is used."""
    reason = "its manifest is another one"
    try:
        if read_with_checksum(opened.path)[1] == opened.checksum:
            return None
    except UsageError as error:
        reason = str(error).removesuffix(REMEDY)
    except RunError as error:
        return error
    return UsageError(f"{socket.gethostname()} does not have the checkpoint '{opened.path}' of rank 0 ({reason})")


def _difference(run: Run, opened: Opened) -> UsageError | RunError | None:
    """Why this machine does not have the checkpoint that rank 0 reads: its first rank compares the manifests' texts."""
    world = launched()
    if run.rank == 0 or world is None or world.local_rank != 0:
        return None
    if not run.sees_first_folder:
        return _fault_of_own(opened)
    reason = "its manifest is another one"
    try:
        if checksum_of_manifest(opened.path) == opened.checksum:
            return None
    except UsageError as error:
        reason = str(error).removesuffix(REMEDY)
    except RunError as error:
        return error
    host = socket.gethostname()
    return RunError(f"{host} sees another checkpoint '{opened.path}' than rank 0 ({reason}); is the folder shared?")
