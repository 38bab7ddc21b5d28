"""Published checkpoints of Hugging Face's form: their folder, and how a family reads their config.json. No torch."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mplug.errors import UsageError, brief, listed

CONFIG = "config.json"
LARGEST_CONFIG = 1 << 26
"""Maximum size of a JSON file of a folder, in bytes."""
_NEUTRAL = """
    architectures model_type dtype torch_dtype transformers_version use_cache initializer_range quantization_config
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id _name_or_path name_or_path
    return_dict output_attentions output_hidden_states output_router_logits id2label label2id task_specific_params
    _commit_hash auto_map tokenizer_class chunk_size_feed_forward is_encoder_decoder is_decoder problem_type
    torchscript prefix finetuning_task use_bfloat16 pruned_heads gradient_checkpointing _attn_implementation
    attn_implementation _attn_implementation_autoset keys_to_ignore_at_inference output_past max_length min_length
    do_sample temperature top_k top_p num_beams num_return_sequences repetition_penalty length_penalty
    no_repeat_ngram_size early_stopping bad_words_ids suppress_tokens begin_suppress_tokens forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty typical_p diversity_penalty
    num_beam_groups encoder_no_repeat_ngram_size output_scores return_dict_in_generate tf_legacy_loss
    cross_attention_hidden_size
"""
NEUTRAL = frozenset(_NEUTRAL.split())
"""Fields of every config.json that do not change what a decoder computes."""
MISSING: Any = object()


@dataclass(frozen=True)
class PublicSettings:
    """The section 'model' that a config.json describes.

    `fixed` are the settings that the weights need: a user may not set other values. `free` are choices of training,
    such as dropout: the user's settings override them. `longest` is the length of the longest sequence that the model
    was made for; None if the family does not know.
    """

    fixed: Mapping[str, Any]
    free: Mapping[str, Any] = field(default_factory=dict)
    longest: int | None = None


class PublicConfig:
    """The content of a config.json, read field by field.

    A family takes, expects or ignores every field; one that it leaves out could change what the model computes, so it
    is an error (`finish`). All methods raise ValueError with one sentence.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields, self._seen = dict(fields), set[str]()

    def take(self, name: str, default: Any = MISSING) -> Any:
        """The value of a field. If it is absent or null, the default; ValueError without a default."""
        self._seen.add(name)
        value = self._fields.get(name)
        if value is None and default is MISSING:
            raise ValueError(f"it lacks the field '{name}'")
        return default if value is None else value

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field, which may be null; the default only if the field is absent."""
        self._seen.add(name)
        return self._fields.get(name, default)

    def number(self, name: str, default: int = MISSING, least: int = 1) -> int:
        """The value of a field that is an integer, at least `least`."""
        value = self.take(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        raise ValueError(f"its field '{name}' is {brief(repr(value))}, but must be an integer of at least {least}")

    def expect(self, name: str, *allowed: Any) -> Any:
        """The value of a field that may only be one of `allowed`; if it is absent or null, the first of them."""
        value = self.take(name, allowed[0])
        if not any(type(value) is type(one) and value == one for one in allowed):
            supported = " or ".join(json.dumps(one) for one in allowed)
            raise ValueError(f"its field '{name}' is {brief(repr(value))}, but the family supports {supported} only")
        return value

    def ignore(self, *names: str) -> None:
        """Note fields that do not change what the model computes."""
        self._seen.update(names)

    def rope(self, theta: float = 10000.0) -> dict[str, Any]:
        """The parameters of rotary positions: `rope_parameters`, or `rope_theta` and `rope_scaling` of older folders.

        The answer has at least `rope_type` and `rope_theta`. `theta` is the family's default.
        """
        base = self.take("rope_theta", theta)
        for name in ("rope_parameters", "rope_scaling"):
            found = self.take(name, None)
            if found is None:
                continue
            if not isinstance(found, Mapping):
                raise ValueError(f"its field '{name}' is {brief(repr(found))}, but must be a mapping")
            kind = found.get("rope_type", found.get("type", "default"))
            return {"rope_theta": base, **{k: v for k, v in found.items() if k != "type"}, "rope_type": kind}
        return {"rope_type": "default", "rope_theta": base}

    def finish(self) -> None:
        """Raise ValueError if a field was neither taken nor expected nor ignored, and is not null."""
        unknown = sorted(
            name for name, value in self._fields.items() if name not in self._seen | NEUTRAL and value is not None
        )
        if unknown:
            raise ValueError(
                f"its {'fields' if len(unknown) > 1 else 'field'} {listed(map(repr, unknown[:8]))} "
                f"{'are' if len(unknown) > 1 else 'is'} unknown to the family, and could change what the model computes"
            )


def is_public(path: Path) -> bool:
    """Whether a path is the folder of a published checkpoint: it has a config.json and no checkpoint.json."""
    return (path / CONFIG).is_file() and not (path / "checkpoint.json").exists()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a folder, whose value is a mapping. Raises UsageError."""
    try:
        if path.stat().st_size > LARGEST_CONFIG:
            raise ValueError(f"it has more than {LARGEST_CONFIG} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error) or "it is nested too deeply"
        raise UsageError(f"cannot read '{path}': {reason}; download the file again") from None
    if not isinstance(value, dict):
        raise UsageError(f"'{path}' is not a mapping of fields; download the file again")
    return value


def architectures_of(fields: Mapping[str, Any]) -> list[str]:
    """The names that identify the family of a config.json, the most specific first."""
    named = fields.get("architectures")
    names: Iterable[Any] = named if isinstance(named, list) else ()
    return [name for name in (*names, fields.get("model_type")) if isinstance(name, str)]
