"""Every field of a config.json, and of the mapping of its tower, has a row with the library's default."""

import dataclasses
from functools import partial
from typing import Any

import pytest

pytest.importorskip("transformers")

from beside_library import changed, library_config
from form_claims import assert_null_is_of_library
from llava_models import CONFIGS, TILED, config_of
from mplug_llava import Llava
from mplug_llava.published import SIZES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mplug_nn import FamilyField, FormField, ReadField, UnusedField, written_config
from mplug_nn.public_values import same_value
from mplug_testing.published import require_tables

FORM, TILED_FORM = Llava.public_forms
TOWER, TILED_TOWER = FORM.fields["vision_config"], TILED_FORM.fields["vision_config"]


def test_every_field_of_the_librarys_classes_is_in_one_row_with_the_librarys_default() -> None:
    assert isinstance(TOWER, FormField)
    assert isinstance(TILED_TOWER, FormField)
    inside = CONFIG_MAPPING["llava"]().vision_config
    for form, name in (
        (FORM, "llava"),
        (TOWER.form, "clip_vision_model"),
        (TILED_FORM, "llava_onevision"),
        *((form, form.model_type) for form in TILED_TOWER.forms),
    ):
        library = CONFIG_MAPPING[name]
        assert not set(form.fields) & set(form.aliases)
        declared = dataclasses.fields(library)
        names = {*library().to_dict(), *(one.name for one in declared), *library.attribute_map}
        assert names <= {*form.fields, *form.aliases}, names - {*form.fields, *form.aliases}
        for one in declared:
            row: Any = form.fields.get(form.aliases.get(one.name, one.name))
            default = getattr(inside, one.name) if form is TOWER.form and one.name in SIZES else one.default
            if isinstance(row, ReadField) and row.required:
                assert one.name in SIZES
            elif row is not None and not isinstance(row, UnusedField | FormField | FamilyField):
                assert same_value(row.default, default), one.name


def test_the_tables_decide_every_setting_once_and_use_every_field() -> None:
    require_tables(Llava)


ALL = {**CONFIGS, "tiled": TILED}


@pytest.mark.parametrize("kind", ALL)
def test_what_is_written_reads_as_the_same_model(kind: str) -> None:
    config = config_of(ALL[kind])
    written = written_config(Llava, config)
    assert config_of(written).computes_like(config)
    assert config_of(library_config(written).to_dict()).computes_like(config)


def test_null_is_refused_or_means_what_the_library_makes_of_it() -> None:
    mappings = ("text_config", "vision_config")
    inside = [f"vision_config.{name}" for name in TILED["vision_config"]]
    inside += [name for name in TILED if name not in (*mappings, "model_type")]
    of_llama = [f"{mapping}.{name}" for mapping in mappings for name in CONFIGS["llama"][mapping]]
    for base, names in ((CONFIGS["llama"], of_llama), (TILED, inside)):
        given_of = partial(lambda base, name: changed(base, {name: None}), base)
        assert_null_is_of_library(names, given_of, config_of, lambda given: library_config(given).to_dict())


@pytest.mark.parametrize("kind", ALL)
def test_how_pictures_are_prepared_and_weights_begin_does_not_prevent_an_export(kind: str) -> None:
    config = config_of(ALL[kind])
    changes = {"init_std": 0.3, "pixel_mean": (0.1, 0.2, 0.3), "typical_pictures": 7}
    own = config.model_copy(update={"vision": config.vision.model_copy(update=changes)})
    assert config_of(written_config(Llava, own)).computes_like(config)
    assert not own.computes_like(
        config.model_copy(update={"vision": config.vision.model_copy(update={"patch_size": 1})})
    )


def test_models_that_no_folder_expresses_are_not_written() -> None:
    config = config_of(CONFIGS["llama"])
    gelu = config.model_copy(update={"projector_activation": "relu2"})
    with pytest.raises(ValueError, match="projector_hidden_act"):
        written_config(Llava, gelu)
    drops = config.model_copy(update={"vision": config.vision.model_copy(update={"norm_before": False})})
    with pytest.raises(ValueError, match=r"cannot express model\.vision"):
        written_config(Llava, drops)
