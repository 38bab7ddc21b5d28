"""`mplug bench`: the steps of runs, measured in turn."""

from mplug_bench.command import command

__all__ = ["command"]
