"""`mplug runs`: the runs of this folder."""

from mplug_runs.command import command

__all__ = ["command"]
