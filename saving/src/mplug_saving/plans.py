"""The plans of saves: the parts that each rank writes. A run keeps them for saves of the same parts. Torch-free."""

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mplug_saving.manifest import TensorTable
from mplug_saving.names import file_of

Part = tuple[Sequence[int], Sequence[int]]
"""Where a part of a tensor begins, and its shape."""


def described(tensors: Iterable[tuple[str, str, Sequence[int], Sequence[Part]]]) -> bytes:
    """The plan of a rank, as compressed text: the name, dtype and shape of each tensor, and the parts to write."""
    return zlib.compress(json.dumps([*tensors]).encode(), 1)


class KeptPlans:
    """The plans of the last save, on one rank of a run.

    A rank sends its plan to the coordinator (rank 0) only if it differs from that of the last save. If no rank sends a
    plan, the coordinator writes the table of tensors that it has made and checked before.
    """

    def __init__(self) -> None:
        self._own = b""
        self._of_ranks: list[bytes] = []
        self._table: TensorTable | None = None

    def to_send(self, plan: bytes) -> bytes | None:
        """The plan that a rank sends to the coordinator; None if the coordinator has it."""
        return None if plan == self._own else plan

    def keep(self, plan: bytes) -> None:
        """Keep the plan of this rank: the coordinator has received and accepted it."""
        self._own = plan

    def receive(self, sent: Sequence[bytes | None]) -> None:
        """Keep the plans of all ranks, on the coordinator; None stands for a plan that it has.

        Raises ValueError if the parts of a tensor overlap, leave gaps, or contradict each other.
        """
        if self._of_ranks and all(plan is None for plan in sent):
            return
        plans = [plan or self._of_ranks[rank] for rank, plan in enumerate(sent)]
        self._table = _table(plans, file_of)
        self._of_ranks = plans

    def table(self, name_of: Callable[[str], str] | None = None) -> TensorTable:
        """The manifest's table of all tensors, on the coordinator. `name_of` maps names of files to other names."""
        assert self._table is not None
        if name_of is None:
            return self._table
        return _table(self._of_ranks, lambda rank: name_of(file_of(rank)))


def _table(plans: Sequence[bytes], file_of: Callable[[int], str]) -> TensorTable:
    tensors: dict[str, dict[str, Any]] = {}
    for rank, plan in enumerate(plans):
        for name, dtype, shape, parts in json.loads(zlib.decompress(plan)):
            saved = tensors.setdefault(name, {"shape": shape, "dtype": dtype, "chunks": []})
            if (saved["shape"], saved["dtype"]) != (shape, dtype):
                raise ValueError(
                    f"rank {rank} has '{name}' as {dtype} of shape {shape}, and another rank as {saved['dtype']} of "
                    f"shape {saved['shape']}"
                )
            saved["chunks"] += [[file_of(rank), start, size] for start, size in parts]
    return TensorTable.of(tensors)
