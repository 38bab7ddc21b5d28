"""A command whose import fails."""

raise RuntimeError("the leg is broken")
