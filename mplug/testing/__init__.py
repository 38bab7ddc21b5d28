"""The kit with which a plugin's author tests a plugin."""

from mplug.testing.workers import WorkerFailed, run_workers

__all__ = ["WorkerFailed", "run_workers"]
