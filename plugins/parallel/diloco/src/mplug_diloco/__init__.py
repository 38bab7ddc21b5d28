"""DiLoCo (arXiv 2311.08105, 2501.18512): workers that train on their own, and average their progress now and then."""

from math import prod
from typing import TYPE_CHECKING

from mplug import Axis, Traffic, UsageError, Variance, contiguous, hookimpl
from mplug_diloco.config import DiLoCoConfig

if TYPE_CHECKING:
    from mplug import Model, Optimizer, Piece, Run, RunConfig

NAME = "diloco"


class DiLoCo:
    """Each worker trains a model of its own on its part of every batch; an outer optimizer averages the workers."""

    Config = DiLoCoConfig

    def __init__(self, config: DiLoCoConfig) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse settings of the host that assume one model, or one optimizer state."""
        if config.parallel.degrees[NAME] == 1:
            return
        if config.parallel.balance:
            raise UsageError(
                "parallel.balance=true lets ranks of one worker compute for another, whose weights differ (diloco); "
                "set parallel.balance=false"
            )
        if config.average is not None:
            raise UsageError(
                "optimizer.average keeps an average of the local weights, and evaluations use the global ones "
                "(diloco); remove the field"
            )
        if config.offload is not None:
            raise UsageError(
                "optimizer.offload moves the states of the inner optimizer only, and the global weights and the outer "
                "momentum of diloco would stay on the device; remove the field"
            )

    @hookimpl
    def mesh_axes(self, config: "RunConfig") -> list[Axis]:
        """One independent axis over the batch, of all views; its ranks are farther than those of all other axes."""
        degree = config.parallel.degrees[NAME]
        views = ("dense", "sparse")
        return [Axis(NAME, degree, entries={"batch": contiguous}, distance=1000, views=views, independent=True)]

    @hookimpl
    def varies(self, config: "RunConfig") -> Variance | None:
        """The workers are not one process; equal runs have as many workers."""
        degree, own = config.parallel.degrees[NAME], self.config
        if degree == 1:
            return None
        sent = "" if own.wire == "full" else f" in {own.wire}"
        return Variance(
            f"{degree} workers train their own weights, and average their progress every {own.every} steps{sent}; this "
            f"is the training of DiLoCo, which no other number of workers computes",
            tolerance=0.9,
            sums=(),
        )

    @hookimpl
    def captures(self, run: "Run") -> bool | str:
        """Exchanges happen at some steps only."""
        if run.mesh.axes[NAME].size == 1:
            return True
        return "exchanges differences at some steps only"

    @hookimpl
    def sends(self, run: "Run", model: "Model") -> "list[Traffic] | None":
        """The differences of every fragment."""
        workers = run.mesh.axes[NAME].size
        if workers == 1:
            return None
        from mplug_diloco.rounds import fragments_of
        from mplug_diloco.wire import bytes_sent

        own, sharding = self.config, model.sharding
        sizes = [0] * own.fragments
        of = fragments_of(model.plan, model.placements, own.fragments)
        for name in (name for name in model.parameters() if name in of):
            placement = model.placements[name]
            held = placement if sharding is None or name not in sharding.of else sharding.placed(placement)
            sizes[of[name]] += prod(held.local_shape(run.rank)) if held.holds(run.rank) else 0
        itemsize = run.precision.master_dtype.itemsize
        return [
            Traffic(
                f"differences of fragment {number}, {own.wire}",
                bytes_sent(size, own.wire, workers, itemsize),
                own.every,
            )
            for number, size in enumerate(sizes)
        ]

    @hookimpl
    def wrap_optimizer(
        self, run: "Run", model: "Model", optimizer: "Optimizer", pieces: "list[Piece]"
    ) -> "Optimizer | None":
        """Add the outer step."""
        if run.mesh.axes[NAME].size == 1:
            return None
        from mplug_diloco.outer import OuterOptimizer

        if optimizer.averages:
            raise UsageError(
                f"the optimizer '{run.config.settings['optimizer', 'name'].value}' keeps averages of the local weights "
                f"for evaluations, and diloco evaluates the global ones; use another optimizer"
            )
        return OuterOptimizer(run, model, optimizer, pieces, self.config)
