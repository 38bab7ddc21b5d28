"""The recorder of steps that the host finds (`mplug.model.recorder.Recorder`)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mplug import DefaultStepper, Model, Run
    from mplug_graphs.stepper import GraphedStepper


class Recorder:
    """The class of the entry-point group 'mplug.recorders'."""

    def begin(self) -> None:
        """Let the process compute on a stream that can be recorded."""
        from mplug_graphs.own_stream import use_own_stream

        use_own_stream()

    def refuse(self, run: "Run", model: "Model") -> None:
        """Refuse parts that do not state that a graph can replay them."""
        from mplug_graphs.obstacles import refuse_graphs

        refuse_graphs(run, model)

    def stepper(self, default: "DefaultStepper") -> "GraphedStepper":
        """The default stepper, recorded."""
        from mplug_graphs.stepper import GraphedStepper

        return GraphedStepper(default)
