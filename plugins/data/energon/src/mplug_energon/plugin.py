"""The plugin: the config of a data set, and its loaders."""

from collections.abc import Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mplug import STREAMS, Loader, UsageError, hookimpl
from mplug_energon.config import CONVERSATIONS, OF_CONVERSATIONS, EnergonConfig
from mplug_tokenization import CorpusTokenizer, Tokenizer, TokenizerRecord, describe_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron.energon import TaskEncoder

    from mplug import Run, RunConfig
    from mplug_tokenization.chat import ChatVocabulary
    from mplug_tokenization.templates import Template

NAMES = ("text", "image-text", CONVERSATIONS)
"""The bundled task encoders."""
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
        if "://" in self.config.path and self.config.path.endswith((".yaml", ".yml")):
            raise UsageError(
                f"data.path '{self.config.path}' is the address of a metadataset, whose parts are paths of a machine; "
                f"use a copy of the file on this machine, or the address of a prepared folder"
            )
        path = self.config.folder
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

    @staticmethod
    def folder_settings(folder: Path, tokenizer: str, options: dict[str, Any]) -> dict[str, Any]:
        """The tokenizer and the chat template of the published checkpoint with which a run begins."""
        from mplug_tokenization.templates import has_template

        found: dict[str, Any] = {"tokenizer": tokenizer, "tokenizer_options": options}
        return found | ({"template": str(folder.absolute())} if has_template(folder) else {})

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse a wrong tokenizer or template, an encoder that is not installed, and settings that it does not use."""
        assert self.described
        own = self.config
        if own.has_conversations:
            self._refuse_for_conversations(config)
            return
        fields = EnergonConfig.model_fields
        for name in OF_CONVERSATIONS:
            if getattr(own, name) != fields[name].get_default(call_default_factory=True):
                raise UsageError(
                    f"data.{name} is for conversations, and data.task_encoder is '{own.task_encoder}'; remove it, or "
                    f"set data.task_encoder={CONVERSATIONS}"
                )
        if ":" not in own.task_encoder:
            if own.task_encoder not in NAMES:
                raise UsageError(
                    f"data.task_encoder '{own.task_encoder}' is neither a bundled encoder ({', '.join(NAMES)}) nor "
                    f"module:Class; use one of these"
                )
            return
        package = own.task_encoder.partition(":")[0].partition(".")[0]
        if find_spec(package) is None:
            raise UsageError(
                f"data.task_encoder '{own.task_encoder}': there is no module '{package}'; install it, or add "
                f"its folder to PYTHONPATH"
            )

    def _refuse_for_conversations(self, config: "RunConfig") -> None:
        own, length = self.config, config.trainer.seq_length
        assert self.template
        for name in ("task_encoder_options", "entries"):
            if getattr(own, name):
                raise UsageError(f"data.{name} has no effect on data.task_encoder={CONVERSATIONS}; remove it")
        if own.packing_buffer_size is not None and own.max_documents > length:
            raise UsageError(
                f"data.max_documents={own.max_documents} is more than trainer.seq_length={length} tokens can hold; set "
                f"data.max_documents to {length} or less"
            )

    @hookimpl
    def batch_entries(self) -> tuple[str, ...]:
        """The entries that the encoder gives besides tokens, labels and positions."""
        return self.config.all_entries

    @cached_property
    def described(self) -> TokenizerRecord:
        """The description of the tokenizer that the config names."""
        return describe_tokenizer(self.config.tokenizer, self.config.tokenizer_options, "data.tokenizer")

    @cached_property
    def tokenizer(self) -> CorpusTokenizer:
        """The tokenizer that the config names."""
        return load_tokenizer(self.described)

    @cached_property
    def template(self) -> "Template":
        """The chat template of conversations, read once."""
        from mplug_tokenization.templates import read_template

        return read_template(self.config.template, self.config.template_variables)

    def vocabulary(self, places: "Mapping[str, int] | None" = None) -> "ChatVocabulary":
        """The tokenizer's tokens, the template with its special tokens, and tokens for places in the text."""
        from mplug_tokenization.chat import ChatVocabulary

        special = self.template.special if self.config.special_tokens is None else self.config.special_tokens
        return ChatVocabulary(self.tokenizer, special, self.template, places)

    @hookimpl
    def build_tokenizer(self) -> Tokenizer:
        """The tokenizer that the encoder receives; that of conversations also encodes special tokens in a text."""
        return self.vocabulary() if self.config.has_conversations else self.tokenizer

    @hookimpl
    def build_loader(self, run: "Run", split: Literal["train", "validation"]) -> Loader:
        """Open this rank's streams of the split's part of the data set."""
        from mplug_energon.reading import Supplied, make_encoder, make_loader

        self.check_data()
        config, trainer = self.config, run.config.trainer
        processor = run.processor if STREAMS in config.all_entries else None
        supplied = Supplied(trainer.seq_length, self.tokenizer, processor)
        if config.has_conversations:
            from mplug_energon.conversations import Conversations
            from mplug_energon.writing import PLACES

            vocabulary = self.vocabulary(PLACES)
            encoder: TaskEncoder = Conversations(config, self.template, vocabulary, run.processor, trainer.seq_length)
        else:
            encoder = make_encoder(config.task_encoder, config.task_encoder_options, supplied)
        return make_loader(
            config,
            encoder,
            supplied,
            part=config.train_part if split == "train" else config.validation_part,
            seed=trainer.seed,
            shard=run.mesh.batch_shard(run.rank),
            micro_batch_size=run.micro_batch_size,
        )
