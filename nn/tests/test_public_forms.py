"""The table of a config.json: what a family states, how the host reads and writes by it, and what the suite refuses."""

import re
from typing import Any

import pytest
from config_fields import forms, plugin_of, tiny
from pydantic import BaseModel, ConfigDict, Field

from mplug.registry.bind_section import bind
from mplug_nn import SHARED_FIELDS, FixedField, PublicForm, ReadField, SumField, UnusedField, Values, written_config
from mplug_testing.published import require_tables
from mplug_testing.suite import Fault

SIZE = Values.integer()


class Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    width: int = Field(8, description="width")
    depth: int = Field(2, description="blocks")
    gain: float = Field(1.0, description="factor of the output")
    noise: float = Field(0.0, description="noise in training")
    skip: bool = Field(False, description="skip tokens")


FIELDS: dict[str, Any] = {
    **SHARED_FIELDS,
    "hidden_size": ReadField(16, SIZE, ("width",)),
    "heads": ReadField(2, SIZE.or_null),
    "layers": ReadField(None, SIZE, ("depth",), required=True),
    "noise_std": ReadField(0.5, Values.not_negative(), ("noise",), training=True),
    "act": FixedField("silu", ("silu", None), "it has one activation"),
    "total": SumField(None, ("hidden_size", "layers")),
    "comment": UnusedField("it is a text"),
}


def form(**changes: Any) -> PublicForm:
    made: dict[str, Any] = {
        "architecture": "TinyModel",
        "model_type": "tiny",
        "fields": FIELDS,
        "aliases": {"d_model": "hidden_size"},
        "settings": lambda values: {"gain": 1.0 if values["heads"] is None else values["heads"] / 2},
        "write": lambda config: {"heads": None if config.gain == 1 else round(config.gain * 2)},
        "altering": {"skip": False},
    }
    return PublicForm(**{**made, **changes})


def family(*forms: PublicForm) -> Any:
    return type("Family", (), {"Config": Config, "public_forms": forms})


def test_a_field_is_read_as_its_row_says() -> None:
    found = form().read({"model_type": "tiny", "layers": 3, "d_model": 4, "total": 7, "comment": [1], "act": None})
    assert found.fixed == {"width": 4, "depth": 3, "gain": 1.0}
    assert (found.free, found.altering) == ({"noise": 0.5}, {"skip": False})
    assert form().read({"layers": 3, "heads": 5}).fixed == {"width": 16, "depth": 3, "gain": 2.5}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "it lacks the field 'layers'"),
        ({"layers": None}, "its field 'layers' is null, but must be an integer of at least 1"),
        ({"layers": True}, "its field 'layers' is true, but must be an integer of at least 1"),
        ({"layers": 1, "hidden_size": 2.0}, "its field 'hidden_size' is 2.0, but must be an integer of at least 1"),
        ({"layers": 1, "heads": 0}, "its field 'heads' is 0, but must be an integer of at least 1, or null"),
        ({"layers": 1, "noise_std": float("nan")}, "its field 'noise_std' is NaN, but must be a number of at least 0"),
        ({"layers": 1, "act": "gelu"}, "its field 'act' is 'gelu', but the family supports \"silu\" or null only"),
        ({"layers": 1, "total": 16}, "its field 'total' is 16, but the family supports 17 only, which is"),
        ({"layers": 1, "hiden_size": 4}, "its field 'hiden_size' is unknown to the family, and could change what the"),
        ({"layers": 1, "d_model": 4, "hidden_size": 5}, "its fields 'hidden_size' and 'd_model' are one, but have the"),
    ],
)
def test_a_value_that_its_row_does_not_accept_is_refused_with_field_value_and_accepted_ones(
    given: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        form().read(given)


def test_an_export_is_what_its_own_table_reads_as_the_same_model() -> None:
    config = Config(width=4, depth=3, gain=2.5, noise=0.25)
    fields = written_config(family(form()), config)
    assert fields["architectures"] == ["TinyModel"]
    assert (fields["hidden_size"], fields["layers"], fields["heads"], fields["noise_std"]) == (4, 3, 5, 0.25)
    with pytest.raises(ValueError, match=r"a config\.json of TinyModel cannot express model\.skip=True"):
        written_config(family(form()), Config(skip=True))
    with pytest.raises(ValueError, match=r"a config.json of TinyModel cannot express model.gain=1\.3"):
        written_config(family(form()), Config(gain=1.3))


def test_a_form_that_forgets_a_setting_when_it_writes_cannot_lose_it() -> None:
    forgetful = form(write=lambda _: {})
    with pytest.raises(ValueError, match=r"cannot express model.gain=2\.5"):
        written_config(family(forgetful), Config(gain=2.5))
    assert written_config(family(forgetful, form()), Config(gain=2.5))["heads"] == 5, "the next form that expresses it"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"fields": {**FIELDS, "depth_": ReadField(1, SIZE, ("deep",))}}, r"sets \['deep'\], which its Config lacks"),
        ({"implied": {"width": 4}}, r"decides \['width'\] in two places"),
        ({"fields": {**FIELDS, "bias": ReadField(False, Values.flag())}}, r"declares \['bias'\] as read, but nothing"),
        ({"aliases": {"act": "hidden_size"}}, r"has \['act'\] both as fields and as aliases"),
        ({"aliases": {"size": "dim"}}, r"has aliases of \['dim'\], which it has no rows for"),
    ],
)
def test_the_suite_finds_a_table_that_overlooks_something(changes: dict[str, Any], fault: str) -> None:
    require_tables(family(form()))
    with pytest.raises(Fault, match=fault):
        require_tables(family(form(**changes)))


STRANGE: list[Any] = [None, True, 0, -1, 7, 1.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), 1 << 70, 10**400]
STRANGE += ["", "silu", "yarn", [], [1], ["full_attention"], {}, {"a": {}}, {"rope_type": "yarn"}, {"rope_type": []}]
OPTIONS = ("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "beta_slow", "truncate")
OPTIONS = (*OPTIONS, "mscale_all_dim", "low_freq_factor", "partial_rotary_factor", "full_attention", "short_factor")


@pytest.mark.wide("fuzz", quick=["qwen3_5_moe_text", "deepseek_v3", "gpt_oss", "gpt2", "nemotron_h"])
@pytest.mark.parametrize("kind", forms())
def test_any_value_of_any_field_is_read_or_refused_in_one_sentence(kind: str) -> None:
    """ValueError is a refusal; another exception would be a traceback of the family."""
    table, model = forms()[kind][1], plugin_of(kind).Config
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    changes: list[dict[str, Any]] = [
        {name: value} for name, row in table.fields.items() if not isinstance(row, UnusedField) for value in STRANGE
    ]
    if "rope_parameters" in table.fields:
        for option in OPTIONS:
            for value in STRANGE:
                options = {**yarn, option: value}
                changes += [{"rope_parameters": options}, {"rope_scaling": options}]
                changes += [{"rope_parameters": {"full_attention": options, "sliding_attention": value}}]
    refusals = [refusal(table, model, tiny(kind, **change)) for change in changes]
    assert all(len(one.splitlines()) <= 1 and len(one) < 500 for one in refusals)
    assert sum(map(bool, refusals)) > len(changes) / 2


def refusal(table: PublicForm, model: type[BaseModel], given: dict[str, Any]) -> str:
    """Why a config.json is refused; empty if it describes a model."""
    try:
        found = table.read(given)
    except ValueError as error:
        return str(error)
    _, problems = bind(model, {**found.choices, **found.fixed})
    assert not any(one.is_fault for one in problems), (given, problems)
    return problems[0].sentence if problems else ""
