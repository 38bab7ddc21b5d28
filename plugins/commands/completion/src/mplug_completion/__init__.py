"""`mplug completion`: install the completion of the command mplug for a shell."""

from mplug_completion.command import command

__all__ = ["command"]
