"""Random tokens, for measurements without a data set."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from mplug import MapLoader, UsageError, hookimpl

if TYPE_CHECKING:
    from mplug import Run, RunConfig


class Mock:
    """Uniform random tokens that no model can learn; sample n is a function of the seed and n."""

    class Config(BaseModel):
        """The vocabulary, and the number of documents per sample."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        vocab_size: int | None = Field(None, ge=1, description="number of tokens in the vocabulary; null: the model's")
        documents: int = Field(
            1,
            ge=1,
            description="number of documents per sample, of random lengths; 1: samples are not packed",
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse more documents than tokens in a sample."""
        if self.config.documents > config.trainer.seq_length:
            raise UsageError(
                f"data.documents={self.config.documents} is more than trainer.seq_length={config.trainer.seq_length} "
                f"tokens can hold; set data.documents to {config.trainer.seq_length} or less"
            )

    @hookimpl
    def batch_entries(self) -> tuple[str, ...]:
        """Document lengths, if samples are packed."""
        return ("document_lengths",) if self.config.documents > 1 else ()

    @hookimpl
    def build_loader(self, run: "Run") -> MapLoader:
        """A loader of random samples; both splits have the same samples."""
        from mplug_mock.samples import reader

        trainer = run.config.trainer
        vocab_size = self.config.vocab_size or run.config.model.vocab_size
        return MapLoader(
            reader(trainer.seed, vocab_size, trainer.seq_length, self.config.documents),
            vocab_size=vocab_size,
            shard=run.mesh.batch_shard(run.rank),
            micro_batch_size=run.micro_batch_size,
        )
