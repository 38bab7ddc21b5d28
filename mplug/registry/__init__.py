"""Plugins: entry points, names, hooks, and the config that names resolve to. Imports no torch."""
