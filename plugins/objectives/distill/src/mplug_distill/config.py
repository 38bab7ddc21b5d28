"""The config of the objective. Imports no torch."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from mplug import Family


class DistillConfig(BaseModel):
    """The teacher, and how far the student is from it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    teacher: Family | None = Field(
        None,
        description="the model that teaches, a section like 'model'; name the folder of its weights, which describes "
        "it, with --set checkpoint.pretrained.parts.teacher=DIR; null: the data have its largest probabilities "
        "(--data taught)",
    )
    divergence: Literal["forward", "reverse", "jsd"] = Field(
        "forward",
        description="forward: KL(teacher || student); reverse: KL(student || teacher); jsd: the generalised "
        "Jensen-Shannon divergence (GKD, 2306.13649)",
    )
    beta: float = Field(0.5, gt=0, lt=1, description="of jsd: the teacher's share of the mixture")
    temperature: PositiveFloat = Field(1.0, description="divides the logits of both models")
    cross_entropy_weight: float = Field(
        0.0, ge=0, lt=1, description="share w of the targets' cross-entropy: (1 - w) divergence + w cross-entropy"
    )
    chunk: PositiveInt = Field(
        1024, description="positions of a sample at which the logits of both models exist at a time"
    )

    @model_validator(mode="after")
    def _beta_has_an_effect(self) -> Self:
        if self.divergence != "jsd" and self.beta != type(self).model_fields["beta"].default:
            raise ValueError(f"beta has no effect: it is of the divergence jsd, not of '{self.divergence}'; remove it")
        return self

    @model_validator(mode="after")
    def _largest_probabilities_suffice(self) -> Self:
        if self.teacher is None and (self.divergence != "forward" or self.temperature != 1):
            field = f"divergence={self.divergence}" if self.divergence != "forward" else "temperature"
            raise ValueError(
                f"{field} needs all probabilities of a teacher in the run, and objectives.distill has none: name its "
                f"folder with checkpoint.pretrained.parts.teacher; largest probabilities in the data serve "
                f"divergence=forward at temperature=1"
            )
        return self
