"""What an optimizer updates, with which values, and how other ranks get the new weights."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mplug.layout.placement import Placement
    from mplug.layout.plan import Parameter


AVERAGE = "average"
"""The state with the shape of a piece that holds an average of its master (`Optimizer.averages`)."""

LOCAL = "local_weight"
"""The name in a checkpoint of masters that are not the values of the model (`Optimizer.weights`)."""


@dataclass
class Piece:
    """What an optimizer updates: one parameter, or the part of it that this rank owns.

    The optimizer updates `master` (fp32) in place from `gradient` (same shape). The host has reduced the gradient, but
    not scaled it. The gradient is fp32; it has the weight's dtype only if the optimizer accepts that
    (`low_precision_gradients`). `weight` is the low-precision copy. The host writes it after the step, or the optimizer
    does (`one_pass`). It is None if the master is the weight itself.
    """

    name: str
    master: "Tensor"
    gradient: "Tensor"
    weight: "Tensor | None"
    parameter: "Parameter"
    placement: "Placement"


def updated_on(pieces: "Sequence[Piece]", device: str) -> "torch.device":
    """The device of the masters (the CPU, if they are offloaded), on which an optimizer counts and gets its scalars.

    A rank may have no pieces: then it is the run's `device`.
    """
    import torch

    return pieces[0].master.device if pieces else torch.device(device)


@dataclass(frozen=True)
class ShapedState:
    """A state of another shape than its parameter: sums over rows, factors of a matrix.

    `shape` is that of the whole state, however ranks cut the parameter. `parts` are this rank's parts of it, by their
    starts. Several ranks may hold the same part; exactly one of them `writes` it to checkpoints.
    """

    shape: tuple[int, ...]
    parts: "Mapping[tuple[int, ...], Tensor]"
    writes: bool


@dataclass(frozen=True)
class WeightExchange:
    """How other ranks, or other copies, get the weights that this rank has updated; in `Model.exchanges`.

    The host calls `begin` when pieces have new weights: after each update, and when it has initialised or loaded
    masters. `begin` may only start the exchange, which forward then hides: the units wait for the weights that they
    use. `wait` waits for all that is under way (on a GPU, lets the current stream wait). It is None if nothing is under
    way when `begin` returns.

    A strategy that stores parts of weights at rest lets a model compute with whole ones without gradients, in functions
    that sampling calls. In the block of `held()`, this rank has the whole weights of all its units; entering it is
    collective. `around(unit, call)` is `call` with those of one unit; each call is collective.
    """

    begin: "Callable[[], None]"
    wait: "Callable[[], None] | None"
    held: Callable[[], AbstractContextManager[None]] | None = None
    around: Callable[[str, Callable[..., Any]], Callable[..., Any]] | None = None


@dataclass(frozen=True)
class StepScalars:
    """The values that change from step to step, as fp32 scalars on the device, so that the CPU never waits for them.

    The optimizer must multiply gradients by `scale` (clipping and the token count). If `skip` is 1, no bit of masters,
    state or weights may change, whatever the values of the gradients and of the other scalars.
    """

    lr: "Tensor"
    scale: "Tensor"
    skip: "Tensor"
    weight_decay: "Tensor"
    statistics: "Mapping[str, Tensor]" = field(default_factory=dict)
    """The step's statistics (`mplug.Buffer`) over all ranks and stages, whole, by the names of the buffers."""

    @classmethod
    def zeros(cls, device: "torch.device") -> Self:
        """Scalars of zeros."""
        import torch

        lr, scale, skip, weight_decay = torch.zeros(4, device=device).unbind()
        return cls(lr, scale, skip, weight_decay)


class Optimizer(ABC):
    """The base class of optimizers: updates pieces.

    Gradients belong to the optimizer, which may overwrite them; the next step writes them anew. By default `step` does
    not write weights: after it, the host rounds masters into weights, which is one more pass over memory.
    `mplug_updates.TorchOptimizer` makes one from a fused optimizer of torch.

    A piece may be any part of a parameter, also a flat range of it: strategies know nothing of optimizers. If the
    update of an element depends on others (the whole matrix, sums over rows), the optimizer asks the
    `mplug.Assembler` for them. To read the attributes below, and to count bytes, the host builds the optimizer from
    tensors without memory. So building must not read values.
    """

    one_pass: bool = False
    """Whether `step` writes the weights itself.

    Afterwards each piece's `weight`, if it has one, is its master rounded to nearest. If `skip` is 1, `step` writes no
    weight.
    """
    low_precision_gradients: bool = False
    """Whether the host may pass a gradient that is a single product, never added to, rounded to the weight's dtype.

    This halves its memory.
    """
    averages: bool = False
    """Whether pieces have a state `AVERAGE`: values that evaluations and exports use in the place of the master."""

    weights: str | None = None
    """The state with the values of the model, if masters are not: evaluations use it.

    Checkpoints hold it as the weight, and the master as the state `LOCAL`.
    """
    shared: frozenset[str] = frozenset()
    """The states with equal values on workers that train independently (`Axis.independent`); others are saved for each.
    """

    @abstractmethod
    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once. The CPU must not wait for the device."""

    def states_moved(self) -> None:  # noqa: B027  # few optimizers keep addresses
        """The states have other memory since the last step (`optimizer.offload`): forget addresses, if you keep some.

        Tensors, and views of them, stay the same objects.
        """

    @abstractmethod
    def state(self, piece: Piece) -> "Mapping[str, Tensor | ShapedState]":
        """The live state of a piece by name; loading copies into its tensors.

        A tensor is a scalar or has the piece's shape. A state of another shape is a `ShapedState`.
        """


def tensors_of(state: "Mapping[str, Tensor | ShapedState]") -> "dict[str, Tensor]":
    """All tensors of a piece's state by name. The name of a part of a `ShapedState` says where the part starts."""
    found: dict[str, Tensor] = {}
    for name, one in state.items():
        if isinstance(one, ShapedState):
            found |= {f"{name} from {list(start)}": part for start, part in one.parts.items()}
        else:
            found[name] = one
    return found
