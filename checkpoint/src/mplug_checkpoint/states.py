"""Whether a run can continue with the optimizer states of a foreign checkpoint."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mplug.contracts.optimizer import Optimizer, Piece
from mplug.errors import listed
from mplug.model.build import states_without_memory
from mplug.model.model import Model
from mplug.run.run import Run
from mplug_pretrained.foreign_match import Match


@dataclass(frozen=True)
class SavedState:
    """An optimizer state that an import writes: its dtype; its value if it is a number, None if it has a shape."""

    dtype: str
    value: float | None


@dataclass(frozen=True)
class States:
    """The optimizer states of each trained parameter, by their names. If there are none, `reason` says why."""

    of: Mapping[str, Mapping[str, SavedState]] = field(default_factory=dict)
    reason: str = ""


def states_of(run: Run, model: Model, found: Match) -> States:
    """The states that the run's optimizer keeps, if the checkpoint has all of them."""
    optimizer, pieces = states_without_memory(run, model)
    if not any(tensor.states for tensor in found.checkpoint.tensors.values()):
        return States(reason="it has no optimizer states that mplug reads")
    states = dict[str, Mapping[str, SavedState]]()
    for piece in pieces:
        if reason := next(_obstacles(run, found, optimizer, piece), ""):
            return States(reason=reason)
        first = found.checkpoint.tensors[found.sources(piece.name)[0]].states
        states[piece.name] = {
            name: SavedState(str(tensor.dtype).removeprefix("torch."), first[name])
            for name, tensor in optimizer.state(piece).items()
        }
    if not any(states.values()):
        return States(reason=f"the optimizer '{_optimizer_name(run)}' keeps no states")
    return States(states)


def _obstacles(run: Run, found: Match, optimizer: Optimizer, piece: Piece) -> Iterator[str]:
    """Why the states of a piece cannot be imported.

    The states with a value for each element must be the same, because optimizers with other states give a state of the
    same name another meaning (Adam's first moment is not Lion's).
    """
    own = optimizer.state(piece)
    shaped = {state for state, tensor in own.items() if tensor.dim() > 0}
    for name in found.sources(piece.name):
        held = found.checkpoint.tensors[name].states
        theirs = {state for state, value in held.items() if value is None}
        if theirs != shaped or not held.keys() >= own.keys():
            yield (
                f"the optimizer '{_optimizer_name(run)}' keeps {listed(sorted(own))} of '{piece.name}', and the "
                f"checkpoint has {listed(sorted(held))} of '{name}'"
            )
    for state in own.keys() - shaped:
        values = {found.checkpoint.tensors[name].states[state] for name in found.sources(piece.name)}
        if len(values) > 1:
            yield f"the tensors of '{piece.name}' have different numbers as '{state}': {listed(map(str, values))}"


def _optimizer_name(run: Run) -> str:
    return str(run.config.settings["optimizer", "name"].value)
