"""`mplug recipes`: list, show and copy installed recipes."""

from mplug_recipes.command import command

__all__ = ["command"]
