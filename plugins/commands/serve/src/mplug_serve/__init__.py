"""`mplug serve`: a server with the interface of OpenAI, with continuous batching and under tensor parallelism."""

from mplug_serve.command import command

__all__ = ["command"]
