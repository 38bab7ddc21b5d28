"""BERT, RoBERTa and ModernBERT: encoders that learn to fill in masked tokens."""

from typing import TYPE_CHECKING

from mplug import UsageError, hookimpl
from mplug_bert.config import BertConfig, ModernBertConfig
from mplug_bert.presets import BERT, MODERN_BERT
from mplug_bert.published import BERT_FORMS, MODERN_BERT_FORMS

if TYPE_CHECKING:
    from mplug import Model, RunConfig


class Bert:
    """BERT and RoBERTa: post-norm blocks and learned positions."""

    Config, presets, public_forms = BertConfig, BERT, BERT_FORMS
    captures = True

    def __init__(self, config: BertConfig) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse sequences that are longer than the table of positions."""
        longest = self.config.longest
        if config.trainer.seq_length > longest:
            raise UsageError(
                f"trainer.seq_length={config.trainer.seq_length} is longer than the {longest} positions of "
                f"model.max_position_embeddings={self.config.max_position_embeddings}; change one of them"
            )

    @hookimpl
    def build_model(self) -> "Model":
        """The encoder on the meta device, and its plan."""
        from mplug_bert.build import build_bert

        return build_bert(self.config)


class ModernBert:
    """ModernBERT: pre-norm blocks, windows in most blocks, rotary positions, and no biases."""

    Config, presets, public_forms = ModernBertConfig, MODERN_BERT, MODERN_BERT_FORMS
    captures = True

    def __init__(self, config: ModernBertConfig) -> None:
        self.config = config

    @hookimpl
    def build_model(self) -> "Model":
        """The encoder on the meta device, and its plan."""
        from mplug_bert.build import build_modernbert

        return build_modernbert(self.config)
