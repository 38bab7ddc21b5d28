"""`mplug doctor`: what this machine and this installation are, and what is wrong with them."""

from mplug_doctor.command import command

__all__ = ["command"]
