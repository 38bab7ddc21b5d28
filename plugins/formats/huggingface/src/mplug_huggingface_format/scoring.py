"""The config.json of a decoder with a head of scores (rewards, classes). Imports no torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from mplug import UsageError, brief

CLASSES = {
    "DeepseekV2ForCausalLM": "DeepseekV2ForSequenceClassification",
    "DeepseekV3ForCausalLM": "DeepseekV3ForSequenceClassification",
    "GPT2LMHeadModel": "GPT2ForSequenceClassification",
    "Gemma2ForCausalLM": "Gemma2ForSequenceClassification",
    "Gemma3ForCausalLM": "Gemma3TextForSequenceClassification",
    "GptOssForCausalLM": "GptOssForSequenceClassification",
    "LlamaForCausalLM": "LlamaForSequenceClassification",
    "MixtralForCausalLM": "MixtralForSequenceClassification",
    "Qwen2ForCausalLM": "Qwen2ForSequenceClassification",
    "Qwen3ForCausalLM": "Qwen3ForSequenceClassification",
    "Qwen3MoeForCausalLM": "Qwen3MoeForSequenceClassification",
    "Qwen3NextForCausalLM": "Qwen3NextForSequenceClassification",
}
"""The classes of transformers 5 with a head `score` at the last token, by those with a projection to the vocabulary."""

SCORE = "score.weight"
"""The end of the name of the weight of the head."""


def class_with_scores(architecture: str) -> str:
    """The class with a head of scores for that of a language model. UsageError if the library has none."""
    if architecture in CLASSES.values():
        return architecture
    if architecture not in CLASSES:
        raise UsageError(
            f"the library transformers has no class with a head of scores for '{brief(architecture)}', so an export "
            f"would lose it; only the checkpoints of the run hold the whole model"
        )
    return CLASSES[architecture]


def scoring(config: Mapping[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """The config.json of a language model -> that of the model with scores named `labels`.

    One score is a reward, which the library trains as a regression; several are those of classes. A config.json that
    has these scores already stays as it is. Raises UsageError as `class_with_scores`.
    """
    architecture = str(config["architectures"][0])
    named = config.get("id2label")
    written = list(named.values()) if isinstance(named, Mapping) else []
    if architecture in CLASSES.values() and (written == [*labels] or len(written) == len(labels) == 1):
        return {**config}
    return {
        **config,
        "architectures": [class_with_scores(architecture)],
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "problem_type": "regression" if len(labels) == 1 else "single_label_classification",
    }
