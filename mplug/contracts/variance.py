"""How far a run with a plugin may differ from the run of one process, and what it sends now and then."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Variance:
    """A declaration that runs with this plugin differ from the run of one process by more than rounding.

    `reason` is a clause for `mplug explain`: 'gradients are rounded to bf16 before they are summed'. `tolerance` bounds
    the relative error of losses, gradients and norms in the tiny fp64 run of `mplug_testing`. The suites add it to
    their usual bound of 1e-10 for runs with the plugin.

    `sums` are the mesh axes over which the plugin itself sums gradients in this way, by listening to sinks. The host
    refuses a run in which any other part sums gradients over one of them. It is empty if the variance has another
    cause.
    """

    reason: str
    tolerance: float
    sums: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.reason:
            raise ValueError("a variance needs a reason")
        if not 0 < self.tolerance < 1:
            raise ValueError(f"the tolerance of a variance is between 0 and 1, not {self.tolerance}")


@dataclass(frozen=True)
class Traffic:
    """What a rank sends beside the passes of a step: `num_bytes` bytes of `what`, in every `every`-th step."""

    what: str
    num_bytes: int
    every: int
