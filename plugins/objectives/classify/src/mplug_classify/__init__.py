"""Classes of texts: a decoder with a head for them, trained by their cross-entropy."""

from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat

from mplug import UsageError, distinct, hookimpl

if TYPE_CHECKING:
    from mplug import Model, Run, RunConfig

Word = Annotated[str, Field(min_length=1)]


class Classification:
    """Computes the scores of classes at the last token of a text."""

    class Config(BaseModel):
        """The classes, and the head."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        labels: Annotated[tuple[Word, ...], AfterValidator(distinct)] = Field(
            min_length=2, description="names of the classes, as the data write them"
        )
        init_std: PositiveFloat = Field(0.02, description="standard deviation of the initial weights of the head")

    captures = True
    computes = "scores of classes"  # in place of the logits of a text
    suggestion = "measure it with: mplug evaluate --name {name}"
    layer = 100  # outside of adapters, which freeze the model that they get: the head is trained

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse labels that are tokens, or at the first token of a text, which sees nothing else in a decoder."""
        at, tokens = getattr(config.data, "label_at", None), getattr(config.data, "vocab_size", None)
        tokens = tokens or getattr(config.model, "vocab_size", None)
        if at is None and (tokens is None or tokens > len(self.config.labels)):
            raise UsageError(
                "objectives.classify needs a class for each text, and this data plugin does not state that its labels "
                "are classes (by a field data.label_at): they may be tokens; use --data labelled"
            )
        if at not in (None, "last"):
            raise UsageError(
                f"objectives.classify reads a text up to its last token, and data.label_at={at} has the label at the "
                f"{at} one; set data.label_at=last"
            )

    @hookimpl
    def adapt_model(self, run: "Run", model: "Model") -> None:
        """Let the model's end compute scores of classes and their loss."""
        from mplug_classify.classes import ClassLoss
        from mplug_nn import replace_end, width_at_end

        label = "objectives/classify"
        loss = ClassLoss(width_at_end(model, label), self.config.labels, self.config.init_std)
        replace_end(run, model, loss, label)
