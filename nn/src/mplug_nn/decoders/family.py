"""A family of decoders as a plugin: a config, and what few families need beyond it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from mplug import hookimpl
from mplug_nn.decoders.config import DecoderConfig

if TYPE_CHECKING:
    from torch import nn

    from mplug import Model


class DecoderFamily:
    """The base of a plugin of the kind `models` whose decoders consist of blocks that its config describes.

        class Ringo(DecoderFamily):
            Config, presets = RingoConfig, PRESETS

    `public_forms` are the published forms of the family, if it has some. A family adds the hooks that it needs
    (`configure`).
    """

    Config: ClassVar[type[DecoderConfig]]
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    public_forms: ClassVar[Any] = ()

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        self._foreign: list[str] = []

    @hookimpl
    def build_model(self) -> "Model":
        """The decoder on the meta device, and its plan."""
        from mplug_nn.decoders.build import build_decoder

        model = build_decoder(self.config)
        self._foreign = sorted({type(part).__name__ for part in model.module.modules() if _is_foreign(part)})
        return model

    @hookimpl
    def captures(self) -> bool | str:
        """True for the shared blocks: none has a state on the CPU or draws from torch's generators.

        A family with modules of its own states `captures = True` if the same holds for them.
        """
        if self._foreign:
            return f"does not state that {', '.join(self._foreign)} can be replayed (set `captures` in the plugin)"
        return True


def _is_foreign(part: "nn.Module") -> bool:
    return not type(part).__module__.startswith(("mplug_nn.", "torch."))
