"""Tiny config.json's, as the transformers library and as a bundled family read them."""

import copy
import importlib
from functools import cache
from typing import Any

import torch
from hybrid_models import mapped_of
from library_models import TABLES, built, difference, drawn, wide

from mplug.registry.entry_points import Registry
from mplug_nn import FormField, PublicForm, forms_of
from mplug_pretrained import PublicSettings

FAMILIES = ("gpt", "llama", "qwen", "granite", "nemotron", "kimi-linear", "mixtral", "gemma", "gpt-oss", "deepseek")
TINY: dict[str, dict[str, Any]] = TABLES["fields"]["kinds"]
"""By `model_type`, the fields of a tiny model; all others are absent."""
SILENT: dict[str, dict[str, Any]] = {
    "gpt2": {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0},
    "mixtral": {"router_jitter_noise": 0.0},
}
"""What a comparison in training mode needs: no random numbers."""


@cache
def forms() -> dict[str, tuple[str, PublicForm]]:
    """By `model_type`, the family that reads it, and its form. Forms with mappings inside are left out."""
    registry = Registry()
    return {
        form.model_type: (family, form)
        for family in FAMILIES
        for form in forms_of(registry.load(registry.find("models", family)))
        if not any(isinstance(row, FormField) for row in form.fields.values())
    }


def tiny(kind: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": kind, **TINY[kind], **fields}


def without(kind: str, *names: str, **fields: Any) -> dict[str, Any]:
    return {name: value for name, value in tiny(kind, **fields).items() if name not in names}


def read(given: dict[str, Any]) -> PublicSettings:
    _, form = forms()[given["model_type"]]
    return form.read(given)


def described(given: dict[str, Any], like: Any = None) -> Any:
    """The family's Config that a config.json describes, with the choices of training of another Config."""
    found = read(given)
    free = {name: getattr(like, name) if like is not None else value for name, value in found.free.items()}
    return plugin_of(given["model_type"]).Config(**{**found.altering, **free, **found.fixed})


@cache
def plugin_of(kind: str) -> Any:
    registry = Registry()
    return registry.load(registry.find("models", forms()[kind][0]))


def library_config(given: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    fields = copy.deepcopy({name: value for name, value in given.items() if name != "model_type"})
    return AutoConfig.for_model(given["model_type"], **fields)


def distance(given: dict[str, Any], ours: Any = None) -> float:
    """The largest difference of logits and gradients, in fp64, of the library's and our model of a config.json.

    `ours` is the family's Config; None: that which the config.json describes.
    """
    from transformers import AutoModelForCausalLM

    kind = given["model_type"]
    module = kind.removesuffix("_text")
    importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    family, form = forms()[kind]
    found = form.read(given)
    settings = {**found.altering, **found.free, **found.fixed} if ours is None else ours.model_dump()
    quiet = ("aux_loss_coefficient", "z_loss_coefficient", "dropout", "attention_dropout", "moe_router_jitter")
    settings |= {name: 0.0 for name in quiet if name in settings}
    with wide(module):
        library: torch.nn.Module = AutoModelForCausalLM.from_config(
            library_config({**given, **SILENT.get(kind, {})}),
            attn_implementation="eager",
            experts_implementation="eager",
        )
        reference = drawn(library)
        with torch.no_grad():
            for name, buffer in reference.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.copy_(torch.linspace(-1, 1, len(buffer)).roll(3))
        return difference(reference, built(family, settings), mapped_of(library.config))
