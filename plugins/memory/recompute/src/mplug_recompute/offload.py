"""Keeps activations in CPU memory between forward and backward, copied on streams of their own.

On a GPU, copies to the CPU overlap with the following units, and copies back start one unit before they are needed. On
a CPU, tensors are copied too, so that the same code runs everywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef


class Offload:
    """Wraps calls so that the tensors that autograd saves are kept in CPU memory.

    These tensors stay on the device: weights, gradient sinks, buffers, scalars, tensors smaller than `min_bytes`, and
    tensors that are not dense.
    """

    def __init__(self, module: nn.Module, min_bytes: int) -> None:
        self.module, self.min_bytes = module, min_bytes
        self.last: ReferenceType[_Call] | None = None
        self._outward: torch.cuda.Stream | None = None
        self._inward: torch.cuda.Stream | None = None
        self._stay: frozenset[int] | None = None

    def wrapped(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `inner` so that autograd keeps no large tensor of its calls on the device."""

        def call(*arguments: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return inner(*arguments, **named)
            saved = _Call(self, self.last)
            self.last = ref(saved)
            with saved_tensors_hooks(saved.pack, saved.unpack):
                result = inner(*arguments, **named)
            saved.copies.clear()
            return result

        return call

    def moves(self, tensor: Tensor) -> bool:
        """Whether a tensor that autograd saves is moved to CPU memory."""
        if tensor.dim() == 0 or tensor.nbytes < max(self.min_bytes, 1) or isinstance(tensor, nn.Parameter):
            return False
        if self._stay is None:
            self._stay = frozenset(_lasting(self.module))
        dense: bool = torch.ops.aten.is_non_overlapping_and_dense(tensor)
        return dense and tensor.untyped_storage().data_ptr() not in self._stay

    def out(self, tensor: Tensor) -> tuple[Tensor, "torch.cuda.Event | None"]:
        """Start copying a tensor to CPU memory; return it and an event for its completion (None for CPU tensors)."""
        if not tensor.is_cuda:
            return tensor.detach().clone(), None
        self._outward = self._outward or torch.cuda.Stream()
        host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True)
        self._outward.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._outward):
            host.copy_(tensor.detach(), non_blocking=True)
            tensor.record_stream(self._outward)  # its memory is not reused before the copy is done
            return host, self._outward.record_event()

    def back(self, host: Tensor, copied: "torch.cuda.Event", device: torch.device) -> "_Arriving":
        """Start copying a tensor back to the device, after the event `copied`."""
        self._inward = self._inward or torch.cuda.Stream()
        self._inward.wait_event(copied)
        with torch.cuda.stream(self._inward):
            arriving = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
            arriving.copy_(host, non_blocking=True)
            return arriving, self._inward.record_event()


_Arriving = tuple[Tensor, "torch.cuda.Event"]


@dataclass(eq=False)
class _Away:
    """A tensor in CPU memory, with the copy back to the device once it has started.

    `copied` is the event at which the copy to the CPU is complete; None for a CPU tensor.
    """

    host: Tensor
    copied: "torch.cuda.Event | None"
    device: torch.device
    arriving: _Arriving | None = None


@dataclass(eq=False)
class _Call:
    """The saved tensors of one call of a unit; `before` is the previous call, whose tensors backward needs next."""

    offload: Offload
    before: "ReferenceType[_Call] | None"
    away: "list[ReferenceType[_Away]]" = field(default_factory=list)
    copies: dict[tuple[Any, ...], tuple[StorageWeakRef, _Away]] = field(default_factory=dict)

    def pack(self, tensor: Tensor) -> "Tensor | _Packed":
        """What autograd saves for a tensor: itself, or a reference to its copy; a call copies each tensor once."""
        if not self.offload.moves(tensor):
            return tensor
        storage = StorageWeakRef(tensor.untyped_storage())  # kept alive so that no other storage gets its number
        key = (storage.cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if key not in self.copies:
            away = _Away(*self.offload.out(tensor), tensor.device)
            self.copies[key] = storage, away
            self.away.append(ref(away))
        return _Packed(self, self.copies[key][1])

    def unpack(self, packed: "Tensor | _Packed") -> Tensor:
        """The saved tensor; also starts the copies of all other tensors of this call and of the previous call."""
        if isinstance(packed, Tensor):
            return packed
        away = packed.away
        if away.copied is None:
            return away.host
        self.start_returning()
        if self.before is not None and (before := self.before()) is not None:
            before.start_returning()
        if away.arriving is None:  # it was unpacked before
            away.arriving = self.offload.back(away.host, away.copied, away.device)
        (tensor, arrived), away.arriving = away.arriving, None
        torch.cuda.current_stream().wait_event(arrived)
        tensor.record_stream(torch.cuda.current_stream())
        return tensor

    def start_returning(self) -> None:
        """Start copying back every tensor of this call; further calls do nothing."""
        references, self.away = self.away, []
        for reference in reversed(references):
            away = reference()
            if away is not None and away.copied is not None:
                away.arriving = self.offload.back(away.host, away.copied, away.device)


@dataclass(frozen=True)
class _Packed:
    call: _Call
    away: _Away


def _lasting(module: nn.Module) -> list[int]:
    """The data pointers of tensors that live longer than a step: parameters, sinks and buffers."""
    parameters = list(module.parameters())
    sinks = [parameter.main_grad for parameter in parameters if hasattr(parameter, "main_grad")]
    tensors = (*parameters, *sinks, *module.buffers())
    return [tensor.untyped_storage().data_ptr() for tensor in tensors]
