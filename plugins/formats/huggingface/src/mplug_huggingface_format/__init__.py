"""Folders of Hugging Face's libraries: models of transformers (config.json, safetensors), and adapters of PEFT."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mplug import UsageError, listed
from mplug_huggingface_format.config_file import ADAPTERS, CONFIG, architectures_of, read_json
from mplug_huggingface_format.model_config import config_of, has_forms, part_settings_of, settings_of
from mplug_huggingface_format.scoring import CLASSES, SCORE, class_with_scores
from mplug_nn import part_forms_of
from mplug_pretrained import DescribedModel, Format, PublicSettings

if TYPE_CHECKING:
    from mplug import Model, Run, RunConfig
    from mplug_pretrained import Export, ExportOptions, FolderWeights, PublishedFolder


class HuggingFace(Format):
    """A whole model, as the library transformers reads and writes it. Adapters are merged into the weights."""

    quantizations = ("int8", "int4")

    def describe(self, folder: Path) -> DescribedModel:
        """The architectures that config.json names."""
        path = folder / CONFIG
        return DescribedModel(path, tuple(architectures_of(read_json(path))))

    def settings(self, folder: Path, family: type[Any]) -> PublicSettings | None:
        """The settings by the family's table of its config.json (`public_forms`)."""
        return settings_of(family, folder / CONFIG)

    def parts_of(self, family: type[Any]) -> tuple[str, ...]:
        """The parts for which the family has tables (`public_parts`)."""
        return tuple(part_forms_of(family))

    def part_settings(self, folder: Path, family: type[Any], part: str) -> PublicSettings:
        """The settings of a part by the family's tables of its config.json."""
        return part_settings_of(family, part, folder / CONFIG)

    def end_tokens(self, folder: Path) -> frozenset[int]:
        """Those of generation_config.json, else those of config.json."""
        files = [folder / "generation_config.json", folder / CONFIG]
        for fields in (read_json(file) for file in files if file.is_file()):
            found: Any = fields.get("eos_token_id")
            if found is not None:
                ends = found if isinstance(found, list) else [found]
                if not all(type(end) is int for end in ends):
                    raise UsageError(f"'{folder}' has the end tokens {listed(map(repr, ends))}; they must be integers")
                return frozenset(ends)
        return frozenset()

    def form_of(self, config: "RunConfig") -> str | None:
        """The architecture of the config.json that an export writes."""
        if not has_forms(config):
            return None
        name = str(config_of(config)["architectures"][0])
        has_scores = any(hasattr(one.plugin, "computes") for one in config.chosen)
        return class_with_scores(name) if has_scores else name

    def open_published(self, folder: Path) -> "PublishedFolder":
        """The folder, whose headers are read."""
        from mplug_huggingface_format.opened import open_folder  # imports torch

        return open_folder(folder)

    def export(self, run: "Run", model: "Model", options: "ExportOptions") -> "Export":
        """The whole model, with the files that the original folder has beside the weights."""
        from mplug_huggingface_format.export import whole_model  # imports torch

        plain = whole_model(run, model, options)
        if options.quantize is None:
            return plain
        from mplug_huggingface_format.quantized import quantised

        return quantised(plain, options.quantize)

    def usage(self, run: "Run", folder: str) -> list[str]:
        """The class of transformers; mplug's own commands for a folder with a tokenizer whose model continues texts."""
        written = Path(folder, CONFIG)
        name = architectures_of(read_json(written))[0] if written.is_file() else self.form_of(run.config)
        clauses = [f'in transformers: transformers.{name}.from_pretrained("{folder}")']
        if Path(folder, "tokenizer.json").is_file() and name not in CLASSES.values():
            clauses.append(f"in mplug: mplug generate --pretrained {folder}, mplug evaluate --pretrained {folder} FILE")
        return clauses


class PEFT(Format):
    """The adapters of a model alone, as the library PEFT reads and writes them."""

    def export(self, run: "Run", model: "Model", options: "ExportOptions") -> "Export":
        """The adapters of the run, which their plugin describes (`mplug_pretrained.Adapters`)."""
        from mplug_huggingface_format.export import adapters_alone  # imports torch

        return adapters_alone(run, model, options)

    def usage(self, run: "Run", folder: str) -> list[str]:
        """The class of PEFT; for a head of scores, with the class of transformers, which does not know their number."""
        written = Path(folder, ADAPTERS)
        if written.is_file() and read_json(written).get("task_type") == "SEQ_CLS":
            from mplug_huggingface_format.adapter_folder import open_adapters

            (shape,) = (one.shape for name, one in open_adapters(Path(folder)).tensors.items() if name.endswith(SCORE))
            base = f"transformers.AutoModelForSequenceClassification.from_pretrained(BASE, num_labels={shape[0]})"
            return [f'in PEFT: peft.PeftModel.from_pretrained({base}, "{folder}")']
        return [f'in PEFT, on the model of the run: peft.PeftModel.from_pretrained(model, "{folder}")']

    def open_adapters(self, folder: Path, model: "Model") -> "FolderWeights":
        """The adapters in a folder, compared with those of the model."""
        from mplug_huggingface_format.adapter_folder import checked, open_adapters  # imports torch

        return checked(open_adapters(folder), model)
