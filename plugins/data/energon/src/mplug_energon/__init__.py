"""Text, images with text and conversations with images through Megatron-Energon, and task encoders for them.

The plugin and the command `contact-sheet` share this package. The plugin is imported lazily, because a command's help
must not import pydantic.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "Energon":
        raise AttributeError(f"module 'mplug_energon' has no attribute '{name}'")
    from mplug_energon.plugin import Energon

    return Energon
