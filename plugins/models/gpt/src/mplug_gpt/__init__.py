"""GPT: pre-norm decoders, from a toy to 462 billion parameters."""

from mplug import RunConfig, UsageError, hookimpl
from mplug_gpt.config import GPTConfig
from mplug_gpt.presets import PRESETS
from mplug_gpt.published import FORMS
from mplug_nn import DecoderFamily


class GPT(DecoderFamily):
    """A decoder with learned, rotary or ALiBi positions, grouped heads, and a choice of norms and activations."""

    Config, presets, public_forms = GPTConfig, PRESETS, FORMS

    @hookimpl
    def configure(self, config: RunConfig) -> None:
        """Refuse sequences that are longer than the table of learned positions."""
        longest = self.config.max_position_embeddings
        if self.config.position == "learned" and config.trainer.seq_length > longest:
            raise UsageError(
                f"trainer.seq_length={config.trainer.seq_length} is longer than "
                f"model.max_position_embeddings={longest}; change one of them, or set model.position=rotary"
            )
