"""`mplug lm-eval`: the tasks of lm-evaluation-harness, on a run or a published checkpoint, under layouts."""

from mplug_lm_eval.command import command

__all__ = ["command"]
