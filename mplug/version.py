"""The version of the host; plugins have the same one."""

__version__ = "0.1.0"
