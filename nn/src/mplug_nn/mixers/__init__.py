"""Token mixers beside attention: scans (linear attention, state spaces, delta rules) and short convolutions."""
