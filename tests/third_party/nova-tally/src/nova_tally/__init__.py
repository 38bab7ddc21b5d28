"""What the runs of a folder have had: steps, tokens, hours."""
