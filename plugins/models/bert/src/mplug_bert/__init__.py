"""BERT, RoBERTa and ModernBERT: encoders that learn to fill in masked tokens."""

from typing import TYPE_CHECKING, Any

from mplug import UsageError, hookimpl
from mplug_bert.config import BertConfig, ModernBertConfig
from mplug_bert.presets import BERT, MODERN_BERT
from mplug_bert.published import BERT_FORMS, MODERN_BERT_FORMS

if TYPE_CHECKING:
    from mplug import Model, Run, RunConfig
    from mplug_bert.config import EncoderConfig


class _Encoder:
    """The hooks that both families share."""

    config: "EncoderConfig"

    @hookimpl
    def wrap_model(self, run: "Run", model: "Model") -> None:
        """Compare the vectors of all data-parallel ranks in the contrastive loss."""
        if self.config.head != "embedding":
            return
        from mplug_bert.across import across
        from mplug_bert.heads import EmbeddingHead

        gathering = across(run)  # collective: all stages of a pipeline call it
        for module in model.module.modules():
            if isinstance(module, EmbeddingHead):
                module.across = gathering

    @hookimpl
    def offer(self, run: "Run") -> list[Any]:
        """Offer nothing. Refuse several micro batches a step with the contrastive loss: each sees its own samples."""
        trainer, (_, ranks) = run.config.trainer, run.mesh.batch_shard(0)
        if self.config.head == "embedding" and run.trains and run.micro_batch_counts() != (1,):
            raise UsageError(
                f"model.head=embedding compares all pairs of a step with each other, and the {ranks} data-parallel "
                f"ranks have several micro batches in a step; set trainer.micro_batch_size="
                f"{trainer.global_batch_size // ranks}, or use more ranks"
            )
        return []


class Bert(_Encoder):
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


class ModernBert(_Encoder):
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
