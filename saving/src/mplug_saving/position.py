"""The position of a run: the samples and tokens that it has consumed, and how checkpoints save and load it."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from mplug.contracts.loader import Stateful
from mplug.errors import RunError, UsageError, printable
from mplug.layout.placement import Placement
from mplug.model.pieces import write_weights
from mplug.run.record import provenance
from mplug.run.run import Run
from mplug.training.assembly import Parts
from mplug_saving.boxes import (
    Boxed,
    State,
    buffer_boxes,
    equal_on_workers,
    held_boxes,
    owned_boxes,
    tensors_of_piece,
)
from mplug_saving.changes import FINGERPRINT, Changes, changes_on_resume, same_data
from mplug_saving.folder import damaged
from mplug_saving.index import refuse_larger, weights_in
from mplug_saving.newest_valid import AgreedCheckpoint, choose
from mplug_saving.opened import Opened
from mplug_saving.plain_data import lift, lower
from mplug_saving.rank_exchanges import at_first
from mplug_saving.saver import Saver, load
from mplug_saving.storage import FolderReader

log = logging.getLogger("mplug")

LOSS_SCALE = "loss_scale"
PLAIN = ("samples", "tokens", "loader", "states")
"""The keys of a manifest that hold a run's position; the names of its tensors are paths: '/states/NAME/...'."""


class Position:
    """The samples and tokens that a run has consumed. With the run's parts, it is everything that a checkpoint holds.

    `changes` are the changes of this resume compared with its checkpoint; `history` also lists those of every earlier
    resume.
    """

    def __init__(self, run: Run, parts: Parts) -> None:
        self.run, self.parts = run, parts
        self.samples = self.tokens = 0
        self.changes = Changes()
        self.history: list[dict[str, Any]] = []
        self.saver = Saver(run)
        self.saver.expect(
            sum(part.nbytes for boxed in self.state(held_boxes).values() for part in boxed.parts.values())
        )
        self.stateful = _stateful(run)

    def save(self) -> None:
        """Save the current step, synchronously or while training continues; `saver` reports when it is complete."""
        self.saver.wait()  # before the ranks exchange anything in the group in which it saves
        tensors: dict[str, Tensor] = {}
        plain = lift(self.plain(), tensors, "")
        state = self.state(owned_boxes)
        if self.run.rank == 0:
            state |= {name: Boxed(tuple(t.shape), {(0,) * t.dim(): t.clone()}) for name, t in tensors.items()}
        self.saver.save(state, {**self.facts(), **plain})

    def plain(self) -> dict[str, Any]:
        """Everything but the tensors of the model and the optimizer; on rank 0 it is complete. Collective."""
        states = {name: stateful.state_dict() for name, stateful in self.stateful.items()}
        plain = {
            "samples": self.samples,
            "tokens": self.tokens,
            "loader": self._loader_state(),
            "states": states,
        }
        if self.parts.loss_scale is not None:
            plain[LOSS_SCALE] = self.parts.loss_scale.state_dict()
        return plain

    def facts(self) -> dict[str, Any]:
        """What a manifest says of the run whose position it holds."""
        run = self.run
        return {
            "step": run.step,
            "saved": datetime.now().astimezone().isoformat(timespec="seconds"),
            "layout": run.config.parallel.layout,
            "world_size": run.mesh.world_size,
            "provenance": provenance(run),
            "config": run.config.resolved(),
            "changes": self.history,
            "varies": {label: printable(variance.reason) for label, variance in run.variances.items()},
            FINGERPRINT: self._fingerprint(),
        }

    def choose(self, newest: Path) -> AgreedCheckpoint:
        """The checkpoint from which the run continues: `newest`, or the newest valid one before it in its folder.

        UsageError if it has done more steps than the run has.
        """
        choice, steps = choose(self.run, newest, self.saver.verified), self.run.config.trainer.steps
        if choice.manifest["step"] > steps:
            raise UsageError(
                f"checkpoint '{choice.path}' is at step {choice.manifest['step']}, and trainer.steps={steps} ends the "
                f"run there; set a larger trainer.steps to continue"
            )
        return choice

    def load(self, choice: AgreedCheckpoint, allowed: tuple[str, ...] = ()) -> None:
        """Continue exactly at a chosen checkpoint; `allowed` are the fields that the user allows to change."""
        run, parts = self.run, self.parts
        path, manifest, opened = choice.path, choice.manifest, choice.opened
        self.changes = changes_on_resume(path, manifest, run, allowed)
        self.history = [*map(dict, manifest.get("changes", [])), *self.changes.record(manifest["step"])]
        same_data(path, manifest, self._fingerprint(), self.changes)
        refuse_larger(f"checkpoint '{path}'", weights_in(opened.index.shapes), parts.model)
        load(run, opened, self.state(held_boxes), self.saver.verified)
        self.filled()
        # Another library has trained on other data: the loader begins anew.
        self.load_plain(f"checkpoint '{path}'", _plain_of(opened), moves_loader="imported" not in opened.facts)
        run.step = manifest["step"]
        self.saver.retention.base = path

    def filled(self) -> None:
        """The tensors of `state(held_boxes)` have new values: write the weights that follow from them. Collective."""
        write_weights(self.parts.pieces)
        self.parts.model.weights_written()

    def load_plain(self, source: str, plain: Mapping[str, Any], moves_loader: bool = True) -> None:
        """Load what `plain` returns: the counters, and the states of the loader, the plugins and the loss scale.

        `source` is its origin, as errors name it.
        """
        for name in self.stateful.keys() ^ plain["states"].keys():
            owner, other = ("the run", "the checkpoint") if name in self.stateful else ("the checkpoint", "the run")
            raise UsageError(
                f"{source}: {owner} has a plugin's state '{name}', and {other} does not; "
                f"resume with the plugins that the checkpoint was saved with"
            )
        for name, stateful in self.stateful.items():
            with _loading_state(source, f"the state '{name}' of a plugin"):
                stateful.load_state_dict(plain["states"][name])
        if self.parts.loss_scale is not None and LOSS_SCALE in plain:  # a run that continues in fp16 begins a new one
            with _loading_state(source, "the loss scale"):
                self.parts.loss_scale.load_state_dict(plain[LOSS_SCALE])
        self.samples, self.tokens = plain["samples"], plain["tokens"]
        if moves_loader:
            with _loading_state(source, "the state of the data loader"):
                self.parts.train_loader.load_state_dict(plain["loader"], plain["samples"])

    def move_to(self, parts: Parts) -> None:
        """Use other parts, of another layout of the same run. They get the values of the old ones afterwards."""
        self.parts, self.stateful = parts, _stateful(self.run)
        self.saver.forget_layout()

    def _fingerprint(self) -> str | None:
        return self.parts.train_loader.loader.fingerprint

    def _loader_state(self) -> dict[str, Any]:
        """The training loader's state; with `merge_states`, that of all parts of the batch (on rank 0)."""
        feed, run = self.parts.train_loader, self.run
        state, merge = feed.state_dict(), feed.loader.merge_states
        if merge is None:
            return state
        part = run.mesh.batch_shard(run.rank)[0]
        parts = dict(at_first(run, (part, state)))
        return merge([parts[part] for part in sorted(parts)]) if parts else {}

    def state(self, boxes_of: Callable[[Placement, Tensor, int], Boxed]) -> State:
        """Every parameter's values, piece's optimizer states and module's states, by the names in a checkpoint.

        `boxes_of` is `held_boxes` to read them, or `owned_boxes` to write them.
        """
        rank, mesh, optimizer = self.run.rank, self.run.mesh, self.parts.optimizer
        found = State()
        for name, frozen in self.parts.model.frozen.items():
            boxed = boxes_of(self.parts.model.placements[name], frozen.data, rank)
            found[f"{name}/weight"] = equal_on_workers(boxed, mesh, rank, boxes_of is owned_boxes)
        for piece in self.parts.pieces:
            found |= tensors_of_piece(piece, optimizer, rank, boxes_of)
        return found | buffer_boxes(self.parts.model, rank, boxes_of)


def _stateful(run: Run) -> dict[str, Stateful]:
    """The objects of all plugins whose state a checkpoint holds, by name."""
    found: dict[str, Stateful] = {}
    owners: dict[str, str] = {}
    for label, offered in run.hooks.each("state", run=run):
        for name, stateful in offered.items():
            if name in owners:
                raise UsageError(f"{owners[name]} and {label} both save a state named '{name}'; use only one of them")
            found[name], owners[name] = stateful, label
    return found


@contextmanager
def _loading_state(source: str, name: str) -> Iterator[None]:
    """Turn an exception of `load_state_dict` into a UsageError; the log gets the traceback of a possible plugin bug."""
    try:
        yield
    except (UsageError, RunError):
        raise
    except Exception as error:
        log.error("%s: %s cannot be loaded", source, name, exc_info=error)
        raise UsageError(
            f"{source}: {name} cannot be loaded ({type(error).__name__}: {error}); resume with the versions "
            f"of the plugins that the checkpoint was saved with"
        ) from error


def _plain_of(opened: Opened) -> dict[str, Any]:
    index, held = opened.index, {**opened.facts}
    reader = FolderReader(opened.path)
    tensors = {name: reader.whole(name, *index.only_chunk(name)) for name in index.shapes if name.startswith("/")}
    try:
        plain: dict[str, Any] = lower({name: held[name] for name in (*PLAIN, LOSS_SCALE) if name in held}, tensors)
    except (KeyError, TypeError) as error:
        reason = f"a state refers to the tensor {error}, which the checkpoint does not hold"
        raise damaged(opened.path, reason) from error
    return plain
