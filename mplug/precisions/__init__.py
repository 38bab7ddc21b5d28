"""The number formats of a run."""
