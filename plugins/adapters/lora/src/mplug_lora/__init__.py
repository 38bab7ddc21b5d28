"""LoRA (arXiv 2106.09685) and DoRA (arXiv 2402.09353): trains low-rank adapters of a frozen model."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from mplug import OF_TRAINING, distinct, hookimpl

if TYPE_CHECKING:
    from mplug import Model, Offer, Run, Wrap

Word = Annotated[str, Field(min_length=1)]


class LoRA:
    """Adds B A to the weights of chosen linears and experts, and trains only A and B."""

    class Config(BaseModel):
        """The adapters: their rank and scale, and the layers that have one."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        rank: PositiveInt = Field(16, description="r: rows of A and columns of B")
        alpha: PositiveFloat = Field(32.0, description="the update B A x is multiplied by alpha / rank")
        rank_stabilized: bool = Field(False, description="divide alpha by the square root of the rank (2312.03732)")
        dropout: Annotated[float, OF_TRAINING] = Field(
            0.0, ge=0, lt=1, description="probability with which an input of A is dropped"
        )
        dora: bool = Field(False, description="train magnitudes of the rows of the adapted weights too (DoRA)")
        experts: Literal["each", "shared"] = Field(
            "each",
            description="each: an A and a B for each expert; shared: one pair for all experts of a layer, which the "
            "rows of all of them train",
        )
        path: Annotated[str | None, OF_TRAINING] = Field(
            None,
            min_length=1,
            description="folder of PEFT with the adapters that a new run begins with; null: new ones",
        )
        base: Annotated[str | None, OF_TRAINING] = Field(
            None,
            min_length=1,
            description="name of the base model in folders of PEFT, NAME or NAME@REVISION: a folder `path` may have "
            "it, and an export writes it; null: the folder of checkpoint.pretrained",
        )
        targets: Annotated[tuple[Word, ...], AfterValidator(distinct), OF_TRAINING] = Field(
            ("linear",),
            min_length=1,
            description="layers with adapters: kinds (linear: all linears of the blocks; attention, mlp, experts), "
            "names of their public modules (q_proj), or patterns of names (blocks.*.attn.qkv)",
        )

    fine_tuning: ClassVar[dict[str, dict[str, Any]]] = {"optimizer": {"name": "adamw", "lr": 2e-4}}
    """Adapters begin with B = 0 and take a tenfold rate of AdamW; another optimizer keeps its own."""

    captures = True
    """Adapters are products; their dropout follows from the samples' keys."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def scale(self) -> float:
        """The factor of the update."""
        root = 0.5 if self.config.rank_stabilized else 1.0
        return float(self.config.alpha / self.config.rank**root)

    @hookimpl
    def adapt_model(self, run: "Run", model: "Model") -> None:
        """Attach an adapter to every target, and freeze all other parameters."""
        from mplug_lora.adapting import adapt

        pretrained = run.config.checkpoint.pretrained
        adapt(model, self.config, self.scale, None if pretrained is None else pretrained.path)

    @hookimpl
    def shard_model(self, run: "Run", model: "Model") -> None:
        """Tell the adapters of fused linears the lengths of the parts on this rank. No placement changes."""
        from mplug_lora.adapting import set_lengths

        set_lengths(run, model)

    @hookimpl
    def offer(self, run: "Run", model: "Model") -> "list[Offer | Wrap]":
        """With dropout, wraps of the units that pass the samples' keys and the positions on to the adapters."""
        from mplug_lora.dropout import wraps

        return wraps(run, model) if self.config.dropout else []
