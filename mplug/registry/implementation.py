"""The marker of the implementations of hooks."""

import pluggy

hookimpl = pluggy.HookimplMarker("mplug")
"""Marks a method of a plugin as the implementation of the hook with its name."""
