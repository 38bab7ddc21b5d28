"""This distribution requires all bundled distributions of mplug. It has no code."""
