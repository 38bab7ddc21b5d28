"""`mplug generate`: sample text from a run or a published checkpoint, with a cache and under layouts."""

from mplug_generate.command import command

__all__ = ["command"]
