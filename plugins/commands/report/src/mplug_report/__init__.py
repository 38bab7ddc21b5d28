"""`mplug report`: one HTML page that compares runs."""

from mplug_report.command import command

__all__ = ["command"]
