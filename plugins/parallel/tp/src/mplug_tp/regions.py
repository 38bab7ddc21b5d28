"""Find the modules that see the whole sequence although sequence parallelism splits the residual stream.

A column-parallel linear gathers the residual stream, and a row-parallel linear scatters it (`suppliers.py`). To find
the modules between the two, this file runs the units on meta tensors. Stand-ins replace the collectives and produce
the shapes that one rank has. A tensor computed from a split tensor counts as split, until it is gathered. Units of
streams do not run: a module in them that does not declare what it mixes counts as one that sees split rows.
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

from mplug import Model, Run, slots_of
from mplug_nn import Boundary, Collective
from mplug_nn.embedding import lookup
from mplug_tp.boundary import SEQUENCE
from mplug_tp.suppliers import dim_of_tp

LONGEST = 512
"""Number of positions per rank to which the run's sequence is halved for the meta run, as long as halves are even."""
TOKENS = "sequence"
"""The named axis of tokens."""
REMEDY = "set parallel.tp.sequence_parallel=false"


def whole_sequences(run: Run, model: Model, names: Collection[str]) -> dict[str, bool | str]:
    """For each named module: True if its inputs hold the whole sequence, else the remedy that the error shows.

    A module whose inputs could not be observed, because it never ran or the meta run failed, gets the remedy too.
    """
    seen, divided = dict[str, bool](), _Divided()
    modules = dict(model.module.named_modules())
    try:
        with _one_rank(run, model, divided), ExitStack() as watches:
            for name in names:
                watch = partial(_watch, seen, divided, name)
                watches.callback(modules[name].register_forward_pre_hook(watch, with_kwargs=True).remove)
            units = tuple(unit for unit in model.plan.units if unit.sequence == TOKENS)
            replace(model, own_units=units).run(_entries(run, model) | _of_streams(model))
    except Exception as error:  # of the model's own code
        reason = f"{REMEDY}: running the units without memory, to see which tensors tp divides, ends in {error!r}"
        return dict.fromkeys(names, reason)
    return {name: True if seen.get(name) else REMEDY for name in names}


def _watch(seen: dict[str, bool], divided: "_Divided", name: str, module: nn.Module, args: Any, named: Any) -> None:
    given = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
    seen[name] = seen.get(name, True) and not any(map(divided.has, given))


class _Divided(TorchDispatchMode):
    """Tracks the split tensors and every tensor computed from them, by storage: views of a split tensor are split."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, torch.UntypedStorage] = {}

    def has(self, x: Tensor) -> bool:
        """Whether a tensor is split."""
        return x.untyped_storage()._cdata in self.storages

    def mark(self, x: Tensor) -> Tensor:
        """Mark a tensor as split; its storage is kept alive so that no other storage gets its address."""
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
    """Within this context, the model runs on the meta device with the shapes of one tp rank.

    Stand-ins fill the slots whose real suppliers communicate or do not run on meta tensors.
    """
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
        "Join.gather": lambda rows: rows,
        "Objective.gathered": gather,
        "Join.positions": scatter,
        "Attention.core": lambda q, _, v, *__, **___: q.new_empty(*q.shape[:-1], v.shape[-1]),
        "Scan.core": _scanned,
        "Experts.compute": lambda rows, *_, **__: rows.clone(),
        "Loss.log_probabilities": lambda hidden, _, labels: hidden.new_zeros(labels.shape),
        "Loss.divergence": lambda hidden, _, __, ___, labels, ____: hidden.new_zeros(labels.shape),
        "Loss.top_probabilities": _of_top,
        "Loss.top_divergence": lambda hidden, _, labels, __, ___: hidden.new_zeros(labels.shape),
        "Loss.cross_entropy": lambda hidden, *_: (hidden.new_zeros(()), hidden.new_zeros((), dtype=torch.int64)),
    }
    around = Boundary(gather, scatter, lambda x: x)
    of_weights: dict[tuple[str, int | None], Any] = {
        ("Linear.gather", 0): Collective(gather, boundary=around),
        ("Linear.scatter", 1): Collective(scatter, boundary=around),
    }
    with ExitStack() as stack:
        for name, part in model.module.named_modules():
            for slot in slots_of(part):
                stand_in = stand_ins.get(slot.name)
                if slot.name.startswith("Linear."):
                    stand_in = of_weights.get((slot.name, dim_of_tp(model, f"{name}.weight")))
                if stand_in is not None:
                    stack.callback(setattr, part, slot.attribute, getattr(part, slot.attribute))
                    setattr(part, slot.attribute, stand_in)
        for entered in (torch.device("meta"), torch.no_grad(), divided):
            stack.enter_context(entered)
        yield


def _scanned(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, write: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    """Results of a scan, which depend on all of its arguments. Its chunks would be thousands of operators per block."""
    given = [q, k, v, decay, *(() if write is None else (write,))]
    y = (v + sum(x.sum() for x in given)).to(v.dtype)
    return y, y.new_zeros(
        y.shape[0], y.shape[2], k.shape[-1], y.shape[-1], dtype=torch.promote_types(y.dtype, torch.float32)
    )


def _of_top(hidden: Tensor, project: Callable[[Tensor], Tensor], k: int) -> tuple[Tensor, Tensor]:
    rows = project(hidden).shape[:-1]
    return hidden.new_zeros((*rows, k), dtype=torch.int64), hidden.new_zeros((*rows, k + 1))


def _of_streams(model: Model) -> dict[str, Tensor]:
    """The activations that units of streams would compute: of size 1 in each dimension, so that they fit any size."""
    names = {name for unit in model.plan.units if unit.sequence != TOKENS for name in unit.outputs}
    return {name: torch.empty([1] * len(model.plan.activations[name]), device="meta") for name in sorted(names)}


def _entries(run: Run, model: Model) -> dict[str, Tensor]:
    """A meta micro batch with the entries that this run has."""
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
