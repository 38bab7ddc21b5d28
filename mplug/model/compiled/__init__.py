"""Compiled units, their caches, and CUDA graphs."""
