"""Every field of a config.json is honoured as the transformers library honours it, or refused by name."""

import re
from typing import Any
from unittest.mock import sentinel

import pytest

pytest.importorskip("transformers")

from beside_library import library_config
from encoder_models import ARCHITECTURES, CONFIGS, config_of, distances, family_of
from form_claims import assert_null_is_of_library, assert_refused, assert_rows_of_library, means_the_same
from pydantic import ValidationError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mplug_nn import written_config
from mplug_nn.public_form import PublicForm, form_of
from mplug_nn.public_rows import ReadField, UnusedField

TOLERANCE = 1e-10
ABSENT = sentinel.absent
"""The value of a field that a config.json lacks."""
KINDS = tuple(CONFIGS)
Case = tuple[str, dict[str, Any]]


def given_of(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a tiny model with these fields."""
    whole = {**CONFIGS[kind], **fields}
    return {name: value for name, value in whole.items() if value is not ABSENT}


def form(kind: str) -> PublicForm:
    given = CONFIGS[kind]
    return form_of(family_of(given).public_forms, given)


# The table, beside the library's classes.


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_the_librarys_class_is_in_one_row_with_the_librarys_default(kind: str) -> None:
    assert_rows_of_library(form(kind), CONFIG_MAPPING[kind])


# What the library makes of a config.json is what we read.

ROPE = {"rope_type": "default", "rope_theta": 50.0}
READ: list[Case] = [
    ("bert", {"num_hidden_layers": ABSENT, "max_position_embeddings": ABSENT, "hidden_dropout_prob": ABSENT}),
    ("bert", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3, "type_vocab_size": 3}),
    ("bert", {"tie_word_embeddings": False, "pad_token_id": 5}),
    ("roberta", {"type_vocab_size": ABSENT, "layer_norm_eps": ABSENT, "pad_token_id": ABSENT}),
    ("roberta", {"pad_token_id": 3, "max_position_embeddings": 20}),
    ("modernbert", {"num_hidden_layers": ABSENT, "local_attention": ABSENT, "vocab_size": 70}),
    ("modernbert", {"global_attn_every_n_layers": 2, "global_rope_theta": 300.0, "local_rope_theta": 30.0}),
    ("modernbert", {"rope_parameters": {"full_attention": ROPE}}),
    ("modernbert", {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}}),
    ("modernbert", {"layer_types": ["sliding_attention", "full_attention"] * 2, "local_attention": 5}),
    ("modernbert", {"hidden_activation": "silu", "classifier_activation": "gelu_new", "norm_bias": True}),
    ("modernbert", {"embedding_dropout": 0.1, "classifier_dropout": 0.2, "decoder_bias": False}),
]


@pytest.mark.parametrize("case", READ, ids=str)
def test_what_the_library_makes_of_a_config_is_what_we_read(case: Case) -> None:
    """The library fills in what is absent and saves it. We read the same from both."""
    given = given_of(*case)
    assert means_the_same(config_of(library_config(given).to_dict()), config_of(given))


@pytest.mark.parametrize("kind", KINDS)
def test_null_is_refused_or_means_what_the_library_makes_of_it(kind: str) -> None:
    """For every field that is read, one after the other."""
    names = [name for name, row in form(kind).fields.items() if not isinstance(row, UnusedField)]
    assert_null_is_of_library(
        names, lambda name: given_of(kind, {name: None}), config_of, lambda given: library_config(given).to_dict()
    )


# What we do not compute is refused.

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bert", {"position_embedding_type": "relative_key"}, "'position_embedding_type' is 'relative_key', but"),
    ("bert", {"is_decoder": True}, "'is_decoder' is true, but the family supports false only"),
    ("bert", {"add_cross_attention": True}, "'add_cross_attention' is true"),
    ("bert", {"hidden_act": "relu"}, "'hidden_act' is 'relu', but the family supports"),
    ("bert", {"hiden_size": 4}, "did you mean 'hidden_size'"),
    ("bert", {"num_hidden_layers": 0}, "'num_hidden_layers' is 0, but must be an integer"),
    ("roberta", {"hidden_act": "gelu_new"}, "the library's head always uses it"),
    ("roberta", {"pad_token_id": None}, "'pad_token_id' is null, but must be an integer of at least 0"),
    ("modernbert", {"attention_dropout": 0.1}, "'attention_dropout' is 0.1, but the family supports 0.0 only"),
    ("modernbert", {"mlp_dropout": 0.1}, "'mlp_dropout' is 0.1, but the family supports 0.0 only"),
    ("modernbert", {"rope_parameters": {"full_attention": {**ROPE, "rope_type": "yarn"}}}, "'yarn', but the family"),
    ("modernbert", {"rope_parameters": {"full_attention": {**ROPE, "factor": 2.0}}}, "full_attention.factor' is unkn"),
    ("modernbert", {"rope_parameters": ROPE}, "'rope_parameters.rope_type' is unknown"),
    ("modernbert", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'rope_scaling' is "),
    ("modernbert", {"layer_types": ["full_attention"]}, "'layer_types' is not a list of 4 of full_att"),
    ("modernbert", {"hidden_activation": "relu"}, "'hidden_activation' is 'relu', but the family supports"),
]


@pytest.mark.parametrize(("kind", "fields", "sentence"), REFUSED)
def test_what_cannot_be_honoured_is_refused_in_a_sentence_with_its_name(
    kind: str, fields: dict[str, Any], sentence: str
) -> None:
    assert_refused(config_of, given_of(kind, fields), sentence)


# What we write is the library's model.

OTHERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tie_embeddings", "norm_bias", "attention_bias", "mlp_bias"), (True, False)),
    **dict.fromkeys(("head_bias", "output_bias"), (True, False)),
    "head": ("embedding",),
    "labels": (),
    "classifier_dropout": (0.2,),
    "pooling": ("mean",),
    "temperature": (0.1,),
    "num_layers": (2,),
    "hidden_size": (64,),
    "num_attention_heads": (2,),
    "vocab_size": (62,),
    "ffn_hidden_size": (28,),
    "activation": ("gelu_tanh", "geglu_tanh", "swiglu", "relu2"),
    "head_activation": ("gelu_tanh", "silu"),
    "norm_eps": (1e-2,),
    "init_std": (0.03,),
    "attention_dropout": (0.2,),
    "dropout": (0.2,),
    "max_position_embeddings": (24,),
    "position_offset": (0, 3),
    "num_token_types": (3,),
    "attention_types": (("full",), ("window", "full")),
    "window": (5, 0),
    "rope_theta": (321.0,),
    "window_rope_theta": (55.0,),
}
"""By setting, values of which at least one differs from that of a tiny model."""


def changed(kind: str) -> list[tuple[str, Any, Any]]:
    """(setting, value, Config) of the tiny model with one other setting, for all that the family allows."""
    base, found = config_of(CONFIGS[kind]), []
    for name in type(base).model_fields:
        for value in OTHERS[name]:
            if value != getattr(base, name):
                try:
                    found.append((name, value, type(base)(**{**base.model_dump(), name: value})))
                except ValidationError:
                    continue
    assert {name for name, _, _ in found} == {*type(base).model_fields} - {"labels"}, kind
    return found


def of_training(kind: str) -> set[str]:
    """The settings of a form that only training uses."""
    rows = (row for row in form(kind).fields.values() if isinstance(row, ReadField) and row.training)
    return {*form(kind).training, *(name for row in rows for name in row.settings)}


def outcome(plugin: Any, config: Any) -> dict[str, Any] | str:
    """The config.json of a Config, or the reason why it is refused."""
    try:
        return written_config(plugin, config)
    except ValueError as reason:
        return str(reason)


@pytest.mark.wide("configs")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_the_librarys_model_with_each_setting(kind: str) -> None:
    """Logits and gradients in fp64, for every setting; what cannot be written is refused by its name."""
    plugin, compared = family_of(CONFIGS[kind]), 0
    for name, value, config in changed(kind):
        fields = outcome(plugin, config)
        if isinstance(fields, str):
            assert re.search(rf"cannot express .*{name}", fields), (name, value, fields)
            assert name not in of_training(kind), name
            continue
        again = config_of(fields)
        kept = {one: getattr(config, one) for one in of_training(kind)}
        assert means_the_same(again.model_copy(update=kept), config), (name, value)
        quiet = {one: 0.0 for one in fields if one.endswith(("_dropout", "_dropout_prob"))}
        found = distances({**fields, **quiet})
        assert max(found.values()) < TOLERANCE, (name, value, found)
        compared += 1
    assert compared > 8


@pytest.mark.parametrize("kind", KINDS)
def test_every_preset_is_exported(kind: str) -> None:
    plugin = family_of(CONFIGS[kind])
    for name, preset in plugin.presets.items():
        config = plugin.Config(**preset["model"])
        if config.__class__ is not config_of(CONFIGS[kind]).__class__:
            continue
        fields = written_config(plugin, config)
        assert means_the_same(config_of(fields), config), name
        assert fields["architectures"][0] in ARCHITECTURES.values()
