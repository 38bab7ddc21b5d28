"""`mplug data look`: samples of a run's data, as the model receives them."""

from mplug_look.command import command

__all__ = ["command"]
