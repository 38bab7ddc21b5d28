"""A recording on the CPU, which replays torch's operations as a CUDA graph replays kernels (`trainer.graphs`).

The operations run again with the same arguments on the same memory: a number that was an argument is frozen, a tensor
that something replaced after the recording is read at its old address, and Python code does not run. So a test on a CPU
shows that a step can be replayed.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

R = TypeVar("R")
UNDEFINED = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")
"""Operations whose results have no defined values."""

OF_FORWARD = ("mplug::count", "mplug::keep_max")
"""Operators that do nothing in a backward pass (`mplug_nn.statistics`)."""


class Reads(Exception):
    """A step reads a value of the device on the CPU, which cannot be recorded."""


@dataclass(frozen=True)
class _Flag:
    """The value that a flag of the CPU had when an operation read it."""

    value: bool


class _Call:
    """An operation with its arguments; `results` are those that share no memory with the arguments."""

    def __init__(self, function: Any, arguments: tuple[Any, Any], output: Any) -> None:
        self.function, self.arguments = function, arguments
        owned = {_memory(x) for x in _tensors(self.arguments)}
        self.results = [(n, x.detach()) for n, x in enumerate(_tensors(output)) if _memory(x) not in owned]

    def __call__(self) -> None:
        args, named = tree_map(lambda x: torch.tensor(x.value) if isinstance(x, _Flag) else x, self.arguments)
        values = list(_tensors(self.function(*args, **named)))
        for number, result in self.results:
            result.copy_(values[number])


class Operations(TorchDispatchMode):
    """A recording of operations on the CPU. Operators of `mplug.tensors.operator` are recorded as a whole.

    `flags` are tensors that belong to the CPU also in a run on a GPU: the flags `stale` of gradient sinks. What happens
    to them happens once, when the operations are recorded, and an operation that reads one keeps its value.
    """

    def __init__(self, flags: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flags = list(flags)
        self._on_cpu = {_memory(flag) for flag in self._flags}
        self._calls: list[_Call] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def record(self, work: Callable[[], R]) -> R:
        """Run `work` and record its operations; afterwards, memory that it has changed has its old values again."""
        with self:
            result = work()
        for storage, values in self._before.values():
            storage.copy_(values)
        self._before.clear()
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """Run the recorded operations."""
        for call in self._calls:
            call()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch calls this for each operation of the step."""
        named = kwargs or {}
        tensors = list(_tensors((args, named)))
        if tensors and all(_memory(x) in self._on_cpu for x in tensors):
            return func(*args, **named)
        if func is torch.ops.aten._local_scalar_dense.default:
            raise Reads("the CPU reads a value of the device")
        frozen = tree_map(self._as_recorded, (args, named))
        for changed in _changed(func, args, named):
            self._keep(changed)
        output = func(*args, **named)
        did_nothing = func.name() in OF_FORWARD and torch._C._current_graph_task_id() != -1
        if not did_nothing and not func.name().startswith(UNDEFINED):
            self._calls.append(_Call(func, frozen, output))
        return output

    def _as_recorded(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return _Flag(bool(value)) if _memory(value) in self._on_cpu else value.detach()

    def _keep(self, changed: Tensor) -> None:
        storage = changed.untyped_storage()
        if storage.data_ptr() not in self._on_cpu:
            self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, Tensor))


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _changed(function: Any, args: Any, named: Any) -> Iterator[Tensor]:
    """The tensors among the arguments that an operation writes."""
    for number, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[number] if number < len(args) else named.get(argument.name))
