"""`mplug evaluate`: loss and perplexity of files, or of a run's own data, under any layout."""

from mplug_evaluate.command import command

__all__ = ["command"]
