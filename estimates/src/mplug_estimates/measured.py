"""Bytes that a rank will hold, measured by a build without memory."""

from collections.abc import Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mplug.contracts.optimizer import tensors_of
from mplug.model.build import allocate_parts, gradient_dtype
from mplug.model.model import Model
from mplug.model.pieces import make_pieces
from mplug.model.products import copies_of
from mplug.model.sharding import shardings
from mplug.model.single_optimizer import build_optimizer
from mplug.model.updates import updates_of
from mplug.run.run import Run


def measure_bytes(run: Run, model: Model) -> dict[str, int]:
    """Bytes that a rank will hold: the storages of a real build, made of tensors without memory."""
    gradients = gradient_dtype(run, model)
    with FakeTensorMode():
        allocate_parts(run, model)
        model.listen(gradients)
        pieces = make_pieces(model) if model.engine is None else shardings().planned_pieces(run, model)
        optimizer = build_optimizer(run, model, pieces)
        states = [tensor for piece in pieces for tensor in tensors_of(optimizer.state(piece)).values()]
        kinds: dict[str, list[torch.Tensor]] = {
            "weights": [parameter for parameter in model.parameters().values() if parameter.requires_grad],
            "frozen weights": list(model.frozen.values()),
            "masters": [piece.master for piece in pieces if piece.weight is not None],
            "gradients": [*(sink.buffer for sink in model.sinks.values()), *(piece.gradient for piece in pieces)],
            "optimizer state": states,
            "copies of weights": copies_of(model),
            "buffers of suppliers": [buffer for one in model.slot_buffers for buffer in one.tensors().values()],
        }
        measured = {kind: _nbytes(tensors) for kind, tensors in kinds.items() if tensors}
        if (updates := updates_of(run, model)) is not None:
            measured |= updates.num_bytes(optimizer)
            measured = {kind: size for kind, size in measured.items() if size}
    of_engine = {} if model.engine is None else model.engine.num_bytes
    stated = {kind.partition(",")[0] for kind in of_engine}
    return {**{kind: size for kind, size in measured.items() if kind not in stated}, **of_engine}


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())
