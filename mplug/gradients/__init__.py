"""Gradients: the sinks that sum them, their reduction over ranks, their norm, and what is counted beside them."""
