"""Every field of PEFT's adapter_config.json, as a table: what mplug does with it, and why.

The fields are those of `LoraConfig` of PEFT 0.21, and those of older versions. A test compares the table with PEFT.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

FILE = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
SCORED = "SEQ_CLS"
"""PEFT's task type of a model with a head of scores."""
SCORE = "score"
"""The module of this head in decoders of transformers."""
HEADS = ("classifier", SCORE)
"""The modules that PEFT itself adds to `modules_to_save` with this task type."""


@dataclass(frozen=True)
class Row:
    """A field: PEFT's default, the rule, and the reason for the rule, as a clause.

    - `read`: the value decides what the adapters compute, and the run must compute the same.
    - `fixed`: only the default and the values in `allowed` are accepted; `remedy` says what to do about others.
    - `unused`: the value has no effect on what the adapters compute.
    """

    rule: Literal["read", "fixed", "unused"]
    default: Any
    reason: str
    allowed: tuple[Any, ...] = ()
    remedy: str = ""

    def accepts(self, value: Any) -> bool:
        """Whether a fixed field may have this value: 1 is not true, and 0 is not false."""
        return any(type(value) is type(one) and value == one for one in (self.default, *self.allowed))


def _read(default: Any, reason: str) -> Row:
    return Row("read", default, reason)


def _fixed(default: Any, reason: str, *allowed: Any, remedy: str = "") -> Row:
    return Row("fixed", default, reason, allowed, remedy)


def _unused(default: Any, reason: str) -> Row:
    return Row("unused", default, reason)


_INITIAL = "only PEFT's way to compute initial values reads it, which the tensors replace"
_CONVERT = "convert them with PEFT: save_pretrained(..., path_initial_model_for_weight_conversion=...)"

FIELDS: Mapping[str, Row] = {
    # What the adapters compute.
    "r": _read(8, "the rank"),
    "lora_alpha": _read(8, "the numerator of the scale"),
    "use_rslora": _read(False, "the denominator of the scale: the rank, or its square root"),
    "use_dora": _read(False, "whether the magnitudes of rows are trained"),
    "rank_pattern": _read({}, "ranks of single modules; each adapted module must have the rank of the run"),
    "alpha_pattern": _read({}, "alphas of single modules; each adapted module must have the alpha of the run"),
    # The layers that have adapters.
    "target_modules": _read(None, "the adapted modules"),
    "exclude_modules": _read(None, "modules that are not adapted"),
    "layers_to_transform": _read(None, "the numbers of the layers whose modules are adapted"),
    "layers_pattern": _read(None, "the name before the number of a layer"),
    "target_parameters": _read(None, "the adapted parameters: those of experts"),
    # The base model.
    "base_model_name_or_path": _read(None, "the model whose adapters these are"),
    "revision": _read(None, "the version of that model"),
    # What mplug does not compute.
    "peft_type": _fixed("LORA", "only LoRA and DoRA are supported"),
    "task_type": _fixed(None, "the adapters belong to a model with another head", "CAUSAL_LM", "SEQ_2_SEQ_LM"),
    "bias": _fixed("none", "the biases of the base model were trained too"),
    "lora_bias": _fixed(False, "the adapters have biases", None),
    "modules_to_save": _fixed(None, "modules of the base model were trained as a whole", []),
    "trainable_token_indices": _fixed(None, "rows of the embedding were trained too"),
    "init_lora_weights": _fixed(
        True,
        "PEFT subtracts the initial adapters from the weights of the base model or, with 'mica', does not train B",
        False,
        "gaussian",
        "orthogonal",
        "eva",
        remedy=_CONVERT,
    ),
    "layer_replication": _fixed(None, "the model has copies of the layers of its base", []),
    "alora_invocation_tokens": _fixed(None, "the adapters act on the tokens after an invocation only (aLoRA)"),
    "use_qalora": _fixed(False, "the inputs of A are averaged over groups (QA-LoRA)", None),
    "velora_config": _fixed(None, "the gradient of A is computed from compressed inputs (VeLoRA)"),
    "monteclora_config": _fixed(None, "the adapters are sampled (MonteCLoRA)"),
    "use_bdlora": _fixed(None, "A or B is block-diagonal (BD-LoRA)"),
    "arrow_config": _fixed(None, "each token chooses among several adapters (Arrow)"),
    "kasa_config": _fixed(None, "the weights of the base model are truncated, and the update has a diagonal (KaSA)"),
    "megatron_config": _fixed(None, "the layers are those of Megatron", {}),
    "enable_lora": _fixed(None, "parts of fused layers have adapters in a form that PEFT gave up with version 0.3"),
    # Without effect on what the adapters compute.
    "lora_dropout": _unused(0.0, "a choice of training: adapters.lora.dropout decides"),
    "fan_in_fan_out": _unused(False, "PEFT itself sets it from the type of each layer"),
    "inference_mode": _unused(False, "whether PEFT trains the adapters after it has loaded them"),
    "auto_mapping": _unused(None, "the class with which PEFT opens the base model"),
    "peft_version": _unused(None, "the version that wrote the folder; all of its fields are in this table"),
    "runtime_config": _unused({"ephemeral_gpu_offload": False}, "PEFT ignores it in files"),
    "megatron_core": _unused("megatron.core", "only layers of Megatron read it (megatron_config)"),
    "qalora_group_size": _unused(16, "only QA-LoRA reads it (use_qalora)"),
    "loftq_config": _unused({}, _INITIAL),
    "eva_config": _unused(None, _INITIAL),
    "corda_config": _unused(None, _INITIAL),
    "lora_ga_config": _unused(None, _INITIAL),
    "ensure_weight_tying": _unused(False, "only adapters of the embedding and the head read it, and there are none"),
    "merge_weights": _unused(False, "PEFT before version 0.3 merged adapters for inference; the sum is the same"),
}
"""By the name of the field. `enable_lora` and `merge_weights` are those of PEFT before version 0.3."""


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Raise ValueError, with one sentence, for a field that mplug does not know, or for an unsupported value of one.

    A field that the table lacks is accepted if it is null, which in PEFT is an option that is not used.
    """
    if "peft_type" not in fields:
        raise ValueError(f"have no peft_type in {FILE}; use a folder that PEFT wrote")
    for name, value in fields.items():
        row = FIELDS.get(name)
        if row is None and value is not None:
            raise ValueError(
                f"have {_shown(name, value)} in {FILE}, a field that mplug does not know, so it could change what the "
                f"adapters compute; if {_shown(name, value)} is PEFT's default, remove the field from the file"
            )
        if row is not None and row.rule == "fixed" and not row.accepts(value):
            allowed = " or ".join(repr(one) for one in (row.default, *row.allowed))
            remedy = row.remedy or f"use adapters with {name}={allowed}"
            raise ValueError(
                f"have {_shown(name, value)} in {FILE}, which mplug does not support: {row.reason}; {remedy}"
            )


def without_scores(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields as those of a language model, for a run that trains scores. They may be those of either.

    A head that is trained as a whole is the scores of the run; other modules remain in the fields.
    """
    whole = fields.get("modules_to_save") or []
    if fields.get("task_type") != SCORED or not isinstance(whole, list) or any(one not in HEADS for one in whole):
        return fields
    return {**fields, "task_type": None, "modules_to_save": None}


def value_of(fields: Mapping[str, Any], name: str) -> Any:
    """The value of a field, or PEFT's default."""
    return fields.get(name, FIELDS[name].default)


def _shown(name: str, value: Any) -> str:
    text = f"{name}={value!r}"
    return text if len(text) <= 100 else f"{text[:97]}..."
