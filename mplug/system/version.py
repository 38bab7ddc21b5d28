"""The version of the host. The bundled plugins have the same version."""

__version__ = "0.1.0"
