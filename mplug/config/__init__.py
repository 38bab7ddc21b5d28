"""The config of a run: settings from every source, bound to typed sections. Imports no torch."""
