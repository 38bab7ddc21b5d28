"""How far a run has come, and how that is saved and loaded."""

from pathlib import Path
from typing import Any

from mplug import checkpoint
from mplug.build import Parts
from mplug.errors import UsageError
from mplug.run import Run, provenance
from mplug.stepper import write_weights


class Position:
    """The samples and tokens that a run has consumed; with the run's parts, all that a checkpoint holds."""

    def __init__(self, run: Run, parts: Parts) -> None:
        self.run, self.parts = run, parts
        self.samples = self.tokens = 0

    def save(self) -> Path:
        """Write the checkpoint of the current step."""
        run, parts = self.run, self.parts
        states: dict[str, Any] = {}
        for _, found in run.hooks.each("state", run=run):
            states |= {name: stateful.state_dict() for name, stateful in found.items()}
        facts = {
            "samples": self.samples,
            "tokens": self.tokens,
            "loader": parts.train_loader.state_dict(),
            "states": states,
            "provenance": provenance(run),
            "config": run.config.resolved(),
        }
        return checkpoint.save(run, parts.pieces, parts.optimizer, parts.model.placements.values(), facts)

    def load(self, path: Path) -> None:
        """Continue exactly where a checkpoint was taken."""
        manifest, run, parts = checkpoint.read_manifest(path), self.run, self.parts
        if manifest["step"] >= run.config.trainer.steps:
            raise UsageError(
                f"checkpoint '{path}' has done all {run.config.trainer.steps} steps of its run; "
                f"to go on, set trainer.steps to more"
            )
        with checkpoint.Reader(path, manifest, run.rank) as reader:
            masters = {piece.name: piece.master for piece in parts.pieces}
            checkpoint.load_weights(reader, masters, parts.model.placements)
            checkpoint.load_optimizer(reader, parts.pieces, parts.optimizer)
        write_weights(parts.pieces)
        for _, found in run.hooks.each("state", run=run):
            for name, stateful in found.items():
                if name not in manifest["states"]:
                    raise UsageError(f"checkpoint '{path}' has no state '{name}'; the run had no such plugin")
                stateful.load_state_dict(manifest["states"][name])
        parts.train_loader.load_state_dict(manifest["loader"])
        run.step, self.samples, self.tokens = manifest["step"], manifest["samples"], manifest["tokens"]
