"""Distillation (arXiv 1503.02531, 2306.13649): a student learns the probabilities of a frozen teacher."""

import logging
from typing import TYPE_CHECKING

from mplug import TOP_TOKENS, UsageError, hookimpl
from mplug_distill.config import DistillConfig
from mplug_distill.taught import Taught as Taught

if TYPE_CHECKING:
    from mplug import Model, Run, RunConfig

log = logging.getLogger("mplug.distill")
LABEL, TEACHER = "objectives/distill", "teacher"


class Distillation:
    """Runs a teacher beside the student in every step, under the same layout."""

    Config, captures = DistillConfig, True
    layer = 100  # outside of adapters, which would adapt the teacher too

    def __init__(self, config: DistillConfig) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse a teacher with another vocabulary, and what its family refuses."""
        if self.config.teacher is None:
            return
        self.config.teacher.call("configure", config=config)
        own, other = (getattr(one, "vocab_size", None) for one in (config.model, self.config.teacher.config))
        if own != other:
            raise UsageError(
                f"objectives.distill: the teacher has {other} tokens (objectives.distill.teacher.vocab_size) and the "
                f"student {own} (model.vocab_size), so their probabilities are of different things; use models with "
                f"the same tokenizer, and pad the table of the smaller one to the same size"
            )

    @hookimpl
    def adapt_model(self, run: "Run", model: "Model") -> None:
        """Let the model's end compute the divergence from the teacher, whose units run before those of the student."""
        from mplug_distill.teaching import DistillLoss, TopDistillLoss
        from mplug_nn import add_frozen_model, set_objective

        if not run.trains:
            return
        teacher = self.config.teacher
        self._refuse_another_number_of_teachers(TOP_TOKENS in run.entries)
        if teacher is None:
            set_objective(run, model, TopDistillLoss(self.config), LABEL)
        else:
            set_objective(run, model, DistillLoss(self.config), LABEL)
            add_frozen_model(run, model, teacher.build(run), TEACHER, LABEL)

    def _refuse_another_number_of_teachers(self, data_teach: bool) -> None:
        if self.config.teacher is None and not data_teach:
            raise UsageError(
                "objectives.distill has no teacher: name the folder of its weights with "
                "checkpoint.pretrained.parts.teacher=DIR, or train on a file of 'mplug teach' (--data taught)"
            )
        if self.config.teacher is not None and data_teach:
            raise UsageError(
                "objectives.distill has two teachers: one in the run (objectives.distill.teacher) and the file of "
                "data/taught; remove one of both"
            )

    @hookimpl
    def run_started(self, run: "Run") -> None:
        """Warn about a teacher that nobody has trained."""
        pretrained = run.config.checkpoint.pretrained
        if self.config.teacher is None:
            return
        if run.rank == 0 and (pretrained is None or TEACHER not in pretrained.parts):
            log.warning(
                "the teacher began with initial values, so it knows nothing: name its folder with "
                "checkpoint.pretrained.parts.teacher"
            )
