"""`mplug explain`: the parts of a run, without starting it."""

from mplug_explain.command import command

__all__ = ["command"]
