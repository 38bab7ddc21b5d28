"""Random tokens and media, for measurements without a data set."""

from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from mplug import ADVANTAGES, DOCUMENTS, LOSS_WEIGHTS, SAMPLED, SEQUENCES, STREAMS, MapLoader, UsageError, hookimpl

if TYPE_CHECKING:
    from mplug import Run, RunConfig
    from mplug_mock.samples import Media
    from mplug_streams import Processor


class Mock:
    """Uniform random tokens that no model can learn; sample n is a function of the seed and n."""

    class Config(BaseModel):
        """The vocabulary, and the numbers of documents and media per sample."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        vocab_size: int | None = Field(None, ge=1, description="number of tokens in the vocabulary; null: the model's")
        documents: int = Field(
            1,
            ge=1,
            description="number of documents per sample, of random lengths; 1: samples are not packed",
        )
        loss_weights: bool = Field(
            False, description="multiply the loss of each document by a random weight between 0 and 2"
        )
        pairs: bool = Field(
            False,
            description="the documents 2i and 2i + 1 of a sample are the answers of a pair, for objectives of pairs",
        )
        rollouts: bool = Field(
            False,
            description="the documents of a sample are completions with random advantages, and tokens have random "
            "log-probabilities with which they were sampled, for objectives of rollouts",
        )
        media: int = Field(
            0, ge=0, description="largest number of pictures of noise in a sample, for a model that takes pictures"
        )
        media_sides: tuple[PositiveInt, PositiveInt] = Field(
            (56, 224), description="smallest and largest height and width of a picture, in pixels"
        )

        media_frames: tuple[PositiveInt, PositiveInt] = Field(
            (1, 1),
            description="smallest and largest number of frames; more than one are a video of two frames in a second",
        )

        @model_validator(mode="after")
        def _pairs_have_two_documents(self) -> Self:
            if self.pairs and self.documents < 2:
                raise ValueError(f"pairs=true needs at least 2 documents in a sample, not {self.documents}")
            return self

        @model_validator(mode="after")
        def _rollouts_are_packed(self) -> Self:
            if self.rollouts and (self.pairs or self.documents < 2):
                raise ValueError("rollouts=true needs at least 2 documents in a sample, and pairs=false")
            return self

        @model_validator(mode="after")
        def _bounds_are_in_order(self) -> Self:
            if self.media_sides[0] > self.media_sides[1]:
                raise ValueError(f"media_sides {self.media_sides} must be the smallest side and the largest")
            if self.media_frames[0] > self.media_frames[1]:
                raise ValueError(f"media_frames {self.media_frames} must be the smallest number and the largest")
            return self

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
        """Document lengths, if samples are packed, weights of losses, numbers of answers, and the entries of media."""
        own = self.config
        given = {
            DOCUMENTS: own.documents > 1,
            LOSS_WEIGHTS: own.loss_weights,
            SEQUENCES: own.pairs or own.rollouts,
            ADVANTAGES: own.rollouts,
            SAMPLED: own.rollouts,
            STREAMS: own.media > 0,
        }
        return tuple(name for name, is_given in given.items() if is_given)

    def _media(self, processor: "Processor", vocab_size: int) -> "Media":
        from mplug_mock.samples import Media

        own = self.config
        if own.media_frames[1] > 1 and not hasattr(processor, "prepare_video"):
            raise UsageError(f"data.media_frames={own.media_frames} has videos, and the model takes none; remove it")
        return Media(processor, own.media, own.media_sides, own.media_frames, vocab_size)

    @hookimpl
    def build_loader(self, run: "Run") -> MapLoader:
        """A loader of random samples; both splits have the same samples."""
        from mplug_mock.samples import reader

        trainer, own = run.config.trainer, self.config
        vocab_size = own.vocab_size or run.config.model.vocab_size
        media = self._media(run.processor, vocab_size) if own.media else None
        read = reader(
            trainer.seed,
            vocab_size,
            trainer.seq_length,
            own.documents,
            media,
            is_weighted=own.loss_weights,
            in_pairs=own.pairs,
            of_rollouts=own.rollouts,
        )

        def documents(number: int) -> list[int]:
            """Makes the sample, so it is there only for runs that balance."""
            lengths: list[int] = read([number])[DOCUMENTS][0].tolist()
            return lengths

        return MapLoader(
            read,
            vocab_size=vocab_size,
            shard=run.mesh.batch_shard(run.rank),
            micro_batch_size=run.micro_batch_size,
            documents=documents if run.config.parallel.balance and own.documents > 1 else None,
        )
