"""DeepSpeed's partitions as pieces: the places of parameters in the flat fp32 tensors that its optimizers update.

    stages 1, 2    one flat tensor of all parameters; each rank owns an equal range of it
    stage 3        each parameter is cut into equal ranges; a rank's ranges of several parameters form a sub-group

The gradients of an update are flat tensors like the masters. With offload they are DeepSpeed's own. Otherwise they are
copies, because DeepSpeed makes its fp32 gradients anew in every step, and optimizers may keep the addresses of pieces.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mplug import Piece

if TYPE_CHECKING:
    from mplug import Model, Run


class Partitions:
    """The masters of this rank in DeepSpeed's memory, their gradients, and the pieces that are views of both."""

    def __init__(self, run: "Run", model: "Model", zero: Any, stage: int) -> None:
        self.zero, self.stage = zero, stage
        self.flats: list[Tensor] = (
            zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
        )
        self.gradients = [
            flat.grad if flat.grad is not None else torch.zeros_like(flat.detach()) for flat in self.flats
        ]
        self.kept = [flat.grad is not None for flat in self.flats]
        self.pieces = list(self._pieces(run, model))

    def _pieces(self, run: "Run", model: "Model") -> "list[Piece]":
        sharding, found = model.sharding, []
        assert sharding is not None
        for name, parameter in model.parameters().items():
            if name not in sharding.of:
                continue
            placement = sharding.placed(model.placements[name])
            if not placement.holds(run.rank):
                continue
            (length,) = placement.local_shape(run.rank)
            group, start = self._place(name, parameter, run, model)
            master = self.flats[group].detach()[start : start + length]
            gradient = self.gradients[group][start : start + length]
            found.append(Piece(name, master, gradient, None, placement.parameter, placement))
        return found

    def _place(self, name: str, parameter: Tensor, run: "Run", model: "Model") -> tuple[int, int]:
        """(number of the flat tensor, start in it) of this rank's part of a parameter."""
        if self.stage == 3:
            group, start, _ = self.zero.grad_position[self.zero.get_param_id(parameter)]
            return int(group), int(start)
        assert model.sharding is not None
        bucket = model.sharding.of[name]
        owner = run.mesh.number(run.rank, bucket.axes)
        first = bucket.starts[bucket.names.index(name)] + bucket.part(name, owner)[0]
        return 0, first - bucket.owned(owner).start

    def receive(self, flat: Tensor) -> None:
        """Take over the gradient that DeepSpeed has set on one of its flat tensors."""
        number = next(number for number, own in enumerate(self.flats) if own is flat)
        gradient = flat.grad
        assert gradient is not None
        if self.kept[number]:
            assert gradient.data_ptr() == self.gradients[number].data_ptr(), "DeepSpeed has moved its gradients"
        else:
            self.gradients[number].copy_(gradient)
            flat.grad = None

    def blank(self) -> None:
        """Set all gradients to zero, for an update that is skipped."""
        for gradient in self.gradients:
            gradient.zero_()

    @torch.no_grad()
    def write_weights(self) -> None:
        """Round the masters into the weights, on all ranks. Collective."""
        zero = self.zero
        if self.stage < 3:
            zero.update_lp_params()
            return
        zero._partition_all_parameters()
        for number in range(len(self.flats)):
            zero._reassign_or_swap_out_partitioned_parameters(number)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
