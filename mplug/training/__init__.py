"""A run, as its processes execute it."""
