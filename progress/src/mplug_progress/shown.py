"""What the host asks for the observer that shows progress (`mplug.training.job.Shown`)."""

from mplug.config.binding import RunConfig


class Shown:
    """The class of the entry-point group 'mplug.progress'."""

    def observer(self, config: RunConfig) -> object:
        """The object with the hooks of an observer, on rank 0."""
        from rich.console import Console

        from mplug_progress.progress_line import ProgressLine

        return ProgressLine(Console(), config.trainer.steps, config.trainer.log_every)
