"""`mplug checkpoint`: look at the checkpoints of a run, and convert them from and to the formats of other software.

Unlike plugins, this package imports private modules of the host: it reads and writes the files of checkpoints, whose
form belongs to the host.
"""

from mplug_checkpoint.command import command

__all__ = ["command"]
