"""Random tokens and images, for measurements and tests without a data set."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from mplug import MapLoader, UsageError, hookimpl

if TYPE_CHECKING:
    from mplug import Run, RunConfig


class MockImages:
    """Uniform random tokens and pixels that no model can learn; sample n is a function of the seed and n."""

    class Config(BaseModel):
        """The images of a sample, and the number of documents per sample."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        images: NonNegativeInt = Field(2, description="a document has 0 to this number of images and videos")
        longest: PositiveInt = Field(4, description="longest side of an image, in rows of the decoder")
        frames: PositiveInt = Field(1, description="frames of the longest video; 1: images only")
        documents: PositiveInt = Field(1, description="documents per sample, of equal lengths; 1: not packed")
        multiple: PositiveInt = Field(1, description="the number of rows of the tower is padded to a multiple of this")

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse models without the tower of this package, and more documents than a sample can hold."""
        from mplug_qwen_vl.config import QwenVLConfig

        model, length = config.model, config.trainer.seq_length
        if not isinstance(model, QwenVLConfig) or model.vision is None:
            raise UsageError(
                "data.name=qwen-vl-mock makes images for models of qwen-vl with a tower; use such a preset (--model "
                "qwen-vl --preset tiny), or another data plugin (--data mock)"
            )
        tokens = (model.vision.image_token, model.vision.video_token, model.vision.start_token, model.vision.end_token)
        if max(tokens) >= model.vocab_size:
            raise UsageError(
                f"the tokens {tokens} of model.vision must be less than model.vocab_size={model.vocab_size}"
            )
        if length % self.config.documents:
            raise UsageError(
                f"data.documents={self.config.documents} does not divide trainer.seq_length={length}; change one"
            )

    @hookimpl
    def batch_entries(self, config: "RunConfig") -> tuple[str, ...]:
        """The entries of images, and document lengths if samples are packed."""
        from mplug_qwen_vl.vision import entries_of

        own = entries_of(config.model.vision)
        return (*own, "document_lengths") if self.config.documents > 1 else own

    @hookimpl
    def build_loader(self, run: "Run") -> MapLoader:
        """A loader of random samples; both splits have the same samples."""
        from mplug_qwen_vl.mock_samples import Amounts, reader

        trainer, model = run.config.trainer, run.config.model
        return MapLoader(
            reader(trainer.seed, trainer.seq_length, model, Amounts(**self.config.model_dump())),
            vocab_size=model.vocab_size,
            shard=run.mesh.batch_shard(run.rank),
            micro_batch_size=run.micro_batch_size,
        )
