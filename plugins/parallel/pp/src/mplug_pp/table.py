"""A pipeline schedule as a table of actions, and a checker that verifies any table. Torch-free.

A table has one row of actions per stage, in the order in which the stage runs them.
"""

from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The kinds of actions."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT_GRADIENT = "W"
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"


@dataclass(frozen=True)
class Action:
    """One action of a stage on one micro batch."""

    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}"


Table = tuple[tuple[Action, ...], ...]

COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT_GRADIENT)
# A transfer: (the sender's action, the receiver's action, the receiver's stage minus the sender's).
FORWARD_TRANSFER = (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD, 1)
BACKWARD_TRANSFER = (Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD, -1)


def with_transfers(compute: Table) -> Table:
    """Add to a table of computations the sends and receives that they need.

    This simulates all stages at once. Each computation takes one time step, and its result is transferred at the end
    of that step. Every row lists the stage's events in this one global order, so even blocking sends cannot deadlock.
    Raises ValueError if the computations wait for each other.
    """
    done: list[dict[Action, None]] = [{} for _ in compute]  # sets in order
    waiting = [deque(actions) for actions in compute]
    while any(waiting):
        ready = [
            stage
            for stage, actions in enumerate(waiting)
            if actions and not _missing(actions[0], stage, len(compute), done[stage])
        ]
        if not ready:
            heads = ", ".join(f"stage {stage} at {actions[0]}" for stage, actions in enumerate(waiting) if actions)
            raise ValueError(f"the schedule deadlocks: {heads}")
        computed = [(stage, waiting[stage].popleft()) for stage in ready]
        for stage, action in computed:
            done[stage][action] = None
        for stage, action in computed:
            _hand_over(done, stage, action)
    return tuple(map(tuple, done))


def _hand_over(done: list[dict[Action, None]], stage: int, action: Action) -> None:
    transfer = {Kind.FORWARD: FORWARD_TRANSFER, Kind.BACKWARD: BACKWARD_TRANSFER}.get(action.kind)
    if transfer and 0 <= stage + transfer[2] < len(done):
        send, receive, further = transfer
        done[stage][Action(send, action.micro_batch)] = None
        done[stage + further][Action(receive, action.micro_batch)] = None


def _missing(action: Action, stage: int, stages: int, done: Container[Action]) -> list[Action]:
    """The actions that this stage must complete before `action` and has not."""
    first, last = stage == 0, stage == stages - 1
    needed = {
        Kind.FORWARD: [] if first else [Kind.RECEIVE_FORWARD],
        Kind.BACKWARD: [Kind.FORWARD] if last else [Kind.FORWARD, Kind.RECEIVE_BACKWARD],
        Kind.WEIGHT_GRADIENT: [Kind.BACKWARD],
        Kind.SEND_FORWARD: [Kind.FORWARD],
        Kind.SEND_BACKWARD: [Kind.BACKWARD],
    }.get(action.kind, [])
    return [need for kind in needed if (need := Action(kind, action.micro_batch)) not in done]


def check(table: Table, num_micro_batches: int) -> list[int]:
    """Verify a table and return each stage's peak of live activations (forwards whose backward is still to come).

    - Every stage runs the forward and the backward of every micro batch once.
    - No action runs before the actions that it needs.
    - Every send has exactly one receive.
    - No stage waits forever, even if a send blocks until it is received.

    Raises ValueError with the first fault.
    """
    for stage, actions in enumerate(table):
        _check_stage(stage, actions, len(table), num_micro_batches)
    _check_rendezvous(table)
    return [_peak(actions) for actions in table]


def _check_stage(stage: int, actions: tuple[Action, ...], stages: int, num_micro_batches: int) -> None:
    if len(set(actions)) < len(actions):
        raise ValueError(f"stage {stage} has the same action twice")
    kinds = [Kind.FORWARD, Kind.BACKWARD]
    kinds += [Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD] if stage < stages - 1 else []
    kinds += [Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD] if stage > 0 else []
    required = {Action(kind, number) for kind in kinds for number in range(num_micro_batches)}
    present = {action for action in actions if action.kind is not Kind.WEIGHT_GRADIENT}
    for action in sorted(present ^ required, key=str):
        raise ValueError(f"stage {stage} {'lacks' if action in required else 'must not run'} {action}")
    done: set[Action] = set()
    for action in actions:
        for need in _missing(action, stage, stages, done):
            raise ValueError(f"stage {stage} runs {action} before {need}")
        done.add(action)


def _check_rendezvous(table: Table) -> None:
    """Simulate the table with sends and receives that block until the other side is ready; raise on a deadlock."""
    at, moved = [0] * len(table), True
    while moved:
        moved = False
        for stage, actions in enumerate(table):
            while at[stage] < len(actions) and actions[at[stage]].kind in COMPUTE:
                at[stage], moved = at[stage] + 1, True
            for partner in _partners(table, at, stage):
                at[stage], at[partner], moved = at[stage] + 1, at[partner] + 1, True
    stuck = [f"stage {s} at {actions[at[s]]}" for s, actions in enumerate(table) if at[s] < len(actions)]
    if stuck:
        raise ValueError(f"blocking sends deadlock: {', '.join(stuck)}")


def _partners(table: Table, at: list[int], stage: int) -> Iterator[int]:
    """The stage whose next action is the receive that matches the next action of `stage`, a send; at most one."""
    if at[stage] == len(table[stage]):
        return
    action = table[stage][at[stage]]
    for send, receive, further in (FORWARD_TRANSFER, BACKWARD_TRANSFER):
        partner = stage + further
        awaited = Action(receive, action.micro_batch)
        if action.kind is send and table[partner][at[partner] : at[partner] + 1] == (awaited,):
            yield partner


def _peak(actions: tuple[Action, ...]) -> int:
    live = peak = 0
    for action in actions:
        live += (action.kind is Kind.FORWARD) - (action.kind is Kind.BACKWARD)
        peak = max(peak, live)
    return peak
