"""`mplug plan`: layouts that fit a number of GPUs, the fastest first."""

from mplug_plan.command import command

__all__ = ["command"]
