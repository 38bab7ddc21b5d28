"""The plugin: the config of a data set, and its loaders."""

from collections.abc import Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mplug import (
    CorpusTokenizer,
    Loader,
    Tokenizer,
    UsageError,
    hookimpl,
)
from mplug_energon.config import EnergonConfig
from mplug_tokenization import TokenizerRecord, describe_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from mplug import Run

META = ".nv-meta"
"""The folder that `energon prepare` writes into a data set."""


def refuse_wrong_blend(path: Path) -> None:
    """Raise UsageError for a file that is not a metadataset, or has a weight that is not above 0.

    Energon's own messages describe its code, not the user's file.
    """
    import yaml

    try:
        metadataset = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"data.path '{path}' is not valid YAML: {' '.join(str(error).split())}; correct it") from None
    if not isinstance(metadataset, dict) or "splits" not in metadataset:
        raise UsageError(
            f"data.path '{path}' is not a metadataset: it has no 'splits'; add them, or set data.path to a prepared "
            f"folder"
        )
    for weight in _weights(metadataset["splits"]):
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise UsageError(f"data.path '{path}' has the weight {weight!r}; use a weight above 0, or remove that part")


def _weights(node: Any) -> Iterator[Any]:
    """The values of `weight` in a metadataset, at any depth."""
    parts = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, part in parts:
        if name == "weight":
            yield part
        else:
            yield from _weights(part)


class Energon:
    """Loads samples of a data set prepared by `energon prepare`, or of a blend, through a task encoder."""

    Config = EnergonConfig

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def check_data(self) -> None:
        """Refuse a data set that is missing or not prepared, and a file that is not a metadataset."""
        path = Path(self.config.path)
        if not path.exists():
            raise UsageError(
                f"data.path '{path}' does not exist; set it to a prepared folder or to a metadataset's YAML file"
            )
        if path.is_dir() and not (path / META).is_dir():
            if next(path.glob("**/*.tar"), None) is None:
                raise UsageError(
                    f"data.path '{path}' contains no tar files; pack its samples into tar files, then run 'energon "
                    f"prepare {path}'"
                )
            raise UsageError(f"data.path '{path}' is not prepared; run 'energon prepare {path}' first")
        if path.is_file() and path.suffix not in (".yaml", ".yml"):
            raise UsageError(
                f"data.path '{path}' is not a YAML file; set it to a prepared folder or to a metadataset's YAML file"
            )
        if path.is_file():
            refuse_wrong_blend(path)

    @hookimpl
    def configure(self) -> None:
        """Refuse a wrong tokenizer, and an encoder whose package is not installed."""
        assert self.described
        package = self.config.task_encoder.partition(":")[0].partition(".")[0]
        if find_spec(package) is None:
            raise UsageError(
                f"data.task_encoder '{self.config.task_encoder}': there is no module '{package}'; install it, or add "
                f"its folder to PYTHONPATH"
            )

    @hookimpl
    def batch_entries(self) -> tuple[str, ...]:
        """The entries that the encoder gives besides tokens, labels and positions."""
        return self.config.entries

    @cached_property
    def described(self) -> TokenizerRecord:
        """The description of the tokenizer that the config names."""
        return describe_tokenizer(self.config.tokenizer, self.config.tokenizer_options, "data.tokenizer")

    @cached_property
    def tokenizer(self) -> CorpusTokenizer:
        """The tokenizer that the config names."""
        return load_tokenizer(self.described)

    @hookimpl
    def build_tokenizer(self) -> Tokenizer:
        """The tokenizer that the encoder receives."""
        return self.tokenizer

    @hookimpl
    def build_loader(self, run: "Run", split: Literal["train", "validation"]) -> Loader:
        """Open this rank's streams of the split's part of the data set."""
        from mplug_energon.reading import make_loader

        self.check_data()
        config, trainer = self.config, run.config.trainer
        return make_loader(
            config,
            self.tokenizer,
            part=config.train_part if split == "train" else config.validation_part,
            seq_length=trainer.seq_length,
            seed=trainer.seed,
            shard=run.mesh.batch_shard(run.rank),
            micro_batch_size=run.micro_batch_size,
        )
