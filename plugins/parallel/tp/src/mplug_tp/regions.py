"""Which modules see the whole sequence although sequence parallelism divides the residual stream.

A column-parallel linear gathers the stream's parts, a row-parallel linear scatters them again (`suppliers.py`). What
lies between the two is found by running the units on tensors without memory, in which stand-ins for the collectives
leave the shapes of one rank. What comes from a divided tensor is divided, until it has been gathered.
B batch, S sequence, D embed, R ranks of tp.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mplug import Model, Run
from mplug.nn.embedding import lookup
from mplug_tp.suppliers import SEQUENCE, dim_of_tp

LONGEST = 512
"""Positions of a rank that the units are run on at most, where the run's sequence can be halved so often."""
REMEDY = "set parallel.tp.sequence_parallel=false"


def whole_sequences(run: Run, model: Model, names: Collection[str]) -> dict[str, bool | str]:
    """For each of the modules True, or what to do, because its input is divided or because that cannot be told."""
    seen, divided = dict[str, bool](), _Divided()
    modules = dict(model.module.named_modules())
    try:
        with _one_rank(run, model, divided), ExitStack() as watches:
            for name in names:
                watch = partial(_watch, seen, divided, name)
                watches.callback(modules[name].register_forward_pre_hook(watch, with_kwargs=True).remove)
            replace(model, own_units=model.plan.units).run(_entries(run, model))
    except Exception as error:  # of the model's own code
        reason = f"{REMEDY}: running the units without memory, to see which tensors tp divides, ends in {error!r}"
        return dict.fromkeys(names, reason)
    return {name: True if seen.get(name) else REMEDY for name in names}


def _watch(seen: dict[str, bool], divided: "_Divided", name: str, module: nn.Module, args: Any, named: Any) -> None:
    given = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
    seen[name] = seen.get(name, True) and not any(map(divided.has, given))


class _Divided(TorchDispatchMode):
    """Knows the tensors that come from a divided one, by their storages: views of a divided tensor are divided."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, torch.UntypedStorage] = {}

    def has(self, x: Tensor) -> bool:
        """Whether a tensor is divided."""
        return x.untyped_storage()._cdata in self.storages

    def mark(self, x: Tensor) -> Tensor:
        """From now on a tensor is divided; its storage is kept, so that no other one gets its address."""
        storage = x.untyped_storage()
        self.storages[storage._cdata] = storage
        return x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        made = func(*args, **named)
        if any(isinstance(leaf, Tensor) and self.has(leaf) for leaf in tree_leaves((args, named))):
            described = [argument.alias_info for argument in func._schema.arguments]
            given = [*args, *(named.get(argument.name) for argument in func._schema.arguments[len(args) :])]
            written = [one for one, alias in zip(given, described, strict=True) if alias and alias.is_write]
            for leaf in tree_leaves((made, written)):
                if isinstance(leaf, Tensor):
                    self.mark(leaf)
        return made


@contextmanager
def _one_rank(run: Run, model: Model, divided: _Divided) -> Iterator[None]:
    """The model for a block as a rank of tp runs it, without memory: what is gathered or scattered has its shape."""
    size = run.mesh.axes["tp"].size

    def sized(x: Tensor, length: int) -> Tensor:
        shape = (*x.shape[:SEQUENCE], length, *x.shape[SEQUENCE + 1 :])
        return torch.empty(shape, dtype=x.dtype, device="meta")

    def gather(x: Tensor) -> Tensor:
        return sized(x, x.shape[SEQUENCE] * size)

    def scatter(x: Tensor) -> Tensor:
        return divided.mark(sized(x, x.shape[SEQUENCE] // size))

    def look_up(indices: Tensor, weight: Tensor) -> Tensor:
        return scatter(lookup(indices, weight))

    stand_ins: dict[str, Callable[..., Any]] = {
        "Embedding.lookup": look_up,
        "Dropout.rows": scatter,
        "Attention.core": lambda q, _, v, *__, **___: q.new_empty(*q.shape[:-1], v.shape[-1]),
        "Experts.compute": lambda rows, *_: rows.clone(),
        "Loss.cross_entropy": lambda hidden, *_: (hidden.new_zeros(()), hidden.new_zeros((), dtype=torch.int64)),
    }
    of_weights = {("Linear.gather", 0): gather, ("Linear.scatter", 1): scatter}
    with ExitStack() as stack:
        for name, part in model.module.named_modules():
            for slot in getattr(type(part), "SLOTS", ()):
                stand_in = stand_ins.get(slot)
                if slot.startswith("Linear."):
                    stand_in = of_weights.get((slot, dim_of_tp(model, f"{name}.weight")))
                if stand_in is not None:
                    attribute = slot.rpartition(".")[2]
                    stack.callback(setattr, part, attribute, getattr(part, attribute))
                    setattr(part, attribute, stand_in)
        for entered in (torch.device("meta"), torch.no_grad(), divided):
            stack.enter_context(entered)
        yield


def _entries(run: Run, model: Model) -> dict[str, Tensor]:
    """A micro batch without memory, of the entries that the run has."""
    size, length = run.mesh.axes["tp"].size, run.config.trainer.seq_length
    while length > LONGEST * size and length % (2 * size) == 0:
        length //= 2
    optional = {name for unit in model.plan.units for name in unit.optional} - run.entries
    lengths = {"batch": 2, "sequence": length}
    return {
        name: torch.empty([lengths.get(axis, 3) for axis in axes], dtype=torch.int64, device="meta")
        for name, axes in model.plan.context.items()
        if name not in optional
    }
