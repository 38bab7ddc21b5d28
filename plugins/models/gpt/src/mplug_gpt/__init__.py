"""GPT: pre-norm decoders, from a toy to 462 billion parameters."""

from typing import TYPE_CHECKING

from mplug import RunConfig, UsageError, hookimpl
from mplug_gpt.config import GPTConfig
from mplug_gpt.presets import PRESETS
from mplug_gpt.published import FORMS

if TYPE_CHECKING:
    from mplug import Model


class GPT:
    """A decoder with learned, rotary or ALiBi positions, grouped heads, and a choice of norms and activations."""

    presets = PRESETS

    Config = GPTConfig
    public_forms = FORMS

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: RunConfig) -> None:
        """Refuse sequences that are longer than the table of learned positions."""
        longest = self.config.max_position_embeddings
        if self.config.position == "learned" and config.trainer.seq_length > longest:
            raise UsageError(
                f"trainer.seq_length={config.trainer.seq_length} is longer than "
                f"model.max_position_embeddings={longest}; change one of them, or set model.position=rotary"
            )

    @hookimpl
    def build_model(self) -> "Model":
        """The decoder on the meta device, and its plan."""
        from mplug_nn import build_decoder

        return build_decoder(self.config)

    @hookimpl
    def captures(self) -> bool:
        """No module has a state on the CPU or draws from torch's generators."""
        return True
