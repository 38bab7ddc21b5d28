"""Random tokens, for measurements that need no data."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from mplug import MapLoader, hookimpl

if TYPE_CHECKING:
    from mplug import Run


class Mock:
    """Sample n is a function of the seed and n: uniform tokens that no model can learn."""

    class Config(BaseModel):
        """Which tokens."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        vocab_size: int | None = Field(None, ge=1, description="tokens are below it; null: the model's vocabulary")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_loader(self, run: "Run") -> MapLoader:
        """Both splits are the same noise."""
        import torch

        trainer = run.config.trainer
        vocab_size = self.config.vocab_size or run.config.model.vocab_size
        positions = torch.arange(trainer.seq_length)[None]

        def read(sample_ids: range) -> dict[str, torch.Tensor]:
            generator = torch.Generator()
            rows = []
            for number in sample_ids:
                generator.manual_seed(hash((trainer.seed, number)))
                rows.append(torch.randint(vocab_size, (trainer.seq_length + 1,), generator=generator))
            windows = torch.stack(rows)  # [B, S + 1]
            ids = torch.tensor(list(sample_ids))
            return {"tokens": windows[:, :-1], "labels": windows[:, 1:], "positions": positions, "sample_ids": ids}

        return MapLoader(
            read, vocab_size=vocab_size, shard=run.mesh.batch_shard(run.rank), micro_batch_size=run.micro_batch_size
        )
