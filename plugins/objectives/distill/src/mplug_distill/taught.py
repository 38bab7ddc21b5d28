"""Data with a teacher's largest probabilities from a file, beside the samples of another data plugin."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mplug import MAY_MOVE, TOP_TAUGHT, TOP_TOKENS, Source, UsageError, hookimpl

if TYPE_CHECKING:
    from mplug import Loader, Run, RunConfig
    from mplug_distill.top_file import TopFile

PROBE = "The quick brown fox, 0123456789.\n\tdef f(x): return x  # Zwölf Boxkämpfer über 東京 Привет"


class Taught:
    """Adds the log-probabilities that 'mplug teach' wrote to the samples of another data plugin."""

    class Config(BaseModel):
        """The data, and the files of the teacher."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        of: Source = Field(description="the data plugin whose samples the teacher has seen: its name, and its fields")
        file: Annotated[str, MAY_MOVE] = Field(min_length=1, description="the file that 'mplug teach' wrote")
        validation_file: Annotated[str | None, MAY_MOVE] = Field(
            None, min_length=1, description="that of the validation split; null: trainer.eval_every must be 0"
        )

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse what the source refuses, and an evaluation without a file."""
        own = self.config
        own.of.call("configure", config=config)
        if own.validation_file is None and config.trainer.eval_every:
            raise UsageError(
                "data.validation_file is null, and trainer.eval_every asks for evaluations; write a file of the "
                "validation split (mplug teach --split validation), or set trainer.eval_every=0"
            )
        taken = {TOP_TOKENS, TOP_TAUGHT}
        if taken & set(own.of.call("batch_entries", config=config) or ()):
            raise UsageError(f"{own.of.label} has the probabilities of a teacher already; use it as data.name")

    @hookimpl
    def check_data(self, config: "RunConfig") -> list[str]:
        """Refuse what the source refuses, files of another vocabulary, and files that are too short for the run."""
        sentences: list[str] = self.config.of.call("check_data", config=config) or []
        trainer = config.trainer
        opened = self._opened("train", config)
        if (
            config.schedule.batch_rampup.start is None
            and opened.num_samples < trainer.steps * trainer.global_batch_size
        ):
            raise UsageError(
                f"{opened.where} is too short: it has {opened.num_samples} samples, and trainer.steps={trainer.steps} "
                f"of {trainer.global_batch_size} samples need {trainer.steps * trainer.global_batch_size}; write more "
                f"of them (mplug teach --samples), or take fewer steps"
            )
        if trainer.eval_every:
            self._opened("validation", config)
        return sentences

    @hookimpl
    def batch_entries(self, config: "RunConfig") -> tuple[str, ...]:
        """Those of the source, and the teacher's."""
        return (*(self.config.of.call("batch_entries", config=config) or ()), TOP_TOKENS, TOP_TAUGHT)

    @hookimpl
    def build_tokenizer(self) -> Any:
        """The source's tokenizer."""
        return self.config.of.call("build_tokenizer")

    @hookimpl
    def build_loader(self, run: "Run", split: Literal["train", "validation"]) -> "Loader":
        """The source's loader, with the teacher's log-probabilities if the run trains: an evaluation needs none."""
        from mplug_distill.loader import TaughtLoader

        inner: Loader = self.config.of.call("build_loader", run=run, split=split)
        if not run.trains:
            return inner
        opened = self._opened(split, run.config)
        origin, own = opened.origin, fingerprint(self.build_tokenizer())
        if None not in (origin.tokenizer, own) and origin.tokenizer != own:
            raise UsageError(
                f"{opened.where} was written with another tokenizer than that of {self.config.of.label}; use the same "
                f"one, or write the file again"
            )
        if None not in (origin.data, inner.fingerprint) and origin.data != inner.fingerprint:
            raise UsageError(
                f"{opened.where} was written from other data than those of {self.config.of.label}, or from other "
                f"samples of them (its split is {origin.split}, trainer.seq_length={origin.seq_length}); use the "
                f"same, or write the file again"
            )
        return TaughtLoader(inner, opened)

    def _opened(self, split: str, config: "RunConfig") -> "TopFile":
        from mplug_distill.top_file import TopFile

        named = self.config.file if split == "train" else self.config.validation_file
        if named is None:
            raise UsageError("data.validation_file is null, so the validation split has no teacher; name its file")
        opened = TopFile(Path(named).expanduser(), "data.file" if split == "train" else "data.validation_file")
        vocab_size = getattr(config.model, "vocab_size", None)
        if vocab_size is not None and opened.origin.vocab_size != vocab_size:
            raise UsageError(
                f"{opened.where} has the probabilities of {opened.origin.vocab_size} tokens, and the student has "
                f"{vocab_size} (model.vocab_size); use models with the same tokenizer, and pad the table of the "
                f"smaller one to the same size"
            )
        return opened


def fingerprint(tokenizer: Any) -> str | None:
    """A digest of a tokenizer's size, and of the tokens that it makes of a text; None without one."""
    if tokenizer is None:
        return None
    found = [tokenizer.vocab_size, [int(one) for one in tokenizer.encode(PROBE)]]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()
