"""A model, a loader and an optimizer that import nothing of mplug but the host's contracts."""

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from mplug import MapLoader, Piece, hookimpl

if TYPE_CHECKING:
    from acme_solo.momentum import Momentum
    from mplug import Model, Run


class Solo:
    """A decoder whose tokens meet in the mean of what came before."""

    presets = {"small": {"model": {"num_layers": 2, "hidden_size": 32}}}

    class Config(BaseModel):
        """The shape of the decoder."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        num_layers: PositiveInt = Field(2, description="blocks")
        hidden_size: PositiveInt = Field(16, description="width of the residual stream")
        vocab_size: PositiveInt = Field(64, description="tokens that the model knows")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_model(self) -> "Model":
        """The decoder on the meta device, and its plan."""
        from acme_solo.decoder import Decoder, make_plan
        from mplug import Model

        decoder = Decoder(self.config)
        return Model(decoder, make_plan(decoder, self.config))


class Counting:
    """Sample n counts upwards from n."""

    class Config(BaseModel):
        """Which numbers there are."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        vocab_size: int = Field(64, ge=2, description="counting continues at 0 after the last number")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_loader(self, run: "Run", split: Literal["train", "validation"]) -> MapLoader:
        """The loader of a split; the samples of the splits differ in their steps."""
        import torch

        length, size = run.config.trainer.seq_length, self.config.vocab_size
        counts = torch.arange(length + 1) * (1 if split == "train" else 2)

        def read(sample_ids: range) -> "dict[str, torch.Tensor]":
            windows = (torch.tensor(list(sample_ids))[:, None] + counts) % size  # [B, S + 1]
            return {
                "tokens": windows[:, :-1],
                "labels": windows[:, 1:],
                "positions": torch.arange(length)[None],
                "sample_ids": torch.tensor(list(sample_ids)),
            }

        return MapLoader(
            read,
            vocab_size=size,
            shard=run.mesh.batch_shard(run.rank),
            micro_batch_size=run.micro_batch_size,
        )


class Descent:
    """Gradient descent with momentum."""

    class Config(BaseModel):
        """The fields that the host's schedules scale, and the momentum."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        lr: float = Field(0.5, gt=0, allow_inf_nan=False, description="peak learning rate; the schedule scales it")
        weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False, description="decay of the parameters that decay")
        momentum: float = Field(0.9, ge=0, lt=1, description="decay rate of the running sum of gradients")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def build_optimizer(self, pieces: list[Piece]) -> "Momentum":
        """The optimizer of this rank's pieces."""
        from acme_solo.momentum import Momentum

        return Momentum(pieces, self.config.momentum)
