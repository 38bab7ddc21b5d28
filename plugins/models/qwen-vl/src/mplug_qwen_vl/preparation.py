"""The preprocessor_config.json of Qwen-VL: how pictures are resized and standardised. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from mplug_nn import FixedField, PublicField, PublicForm, ReadField, UnusedField, Values

VISION = "vision"
"""Our section of the tower."""
SIZE = Values.integer().or_null
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""The library's values if a file states none."""
SHORTEST, LONGEST = 56 * 56, 28 * 28 * 1280
"""The library's smallest and largest area of a picture in pixels."""


def _is_colours(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3 and all(type(one) in (int, float) for one in value)


COLOURS = Values(_is_colours, "a list of three numbers")
OURS = {"patch_size": "patch_size", "temporal_patch_size": "patch_frames", "merge_size": "merge_size"}
"""Fields that the tower of config.json must have too."""
ALWAYS = "the family always does it"


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    size = values["size"] or {}
    if unknown := sorted(set(size) - {"shortest_edge", "longest_edge"}):
        raise ValueError(f"its field 'size' has {unknown}, and the family reads 'shortest_edge' and 'longest_edge'")
    bounds = {
        "min_pixels": values["min_pixels"] or size.get("shortest_edge") or SHORTEST,
        "max_pixels": values["max_pixels"] or size.get("longest_edge") or LONGEST,
    }
    for name, value in bounds.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"its field 'size' has {value!r} as {name}, which must be an integer of at least 1")
    colours = {"pixel_mean": tuple(values["image_mean"]), "pixel_std": tuple(values["image_std"])}
    return {VISION: {**bounds, **colours, **{ours: values[theirs] for theirs, ours in OURS.items()}}}


FIELDS: dict[str, PublicField] = {
    "size": ReadField(None, Values.mapping().or_null),
    "min_pixels": ReadField(None, SIZE),
    "max_pixels": ReadField(None, SIZE),
    "image_mean": ReadField(CLIP_MEAN, COLOURS),
    "image_std": ReadField(CLIP_STD, COLOURS),
    "patch_size": ReadField(14, Values.integer()),
    "temporal_patch_size": ReadField(2, Values.integer()),
    "merge_size": ReadField(2, Values.integer()),
    **{name: FixedField(True, (True,), ALWAYS) for name in ("do_resize", "do_rescale", "do_normalize")},
    "do_convert_rgb": FixedField(True, (True, None), ALWAYS),
    "rescale_factor": FixedField(1 / 255, (1 / 255,), "colours are divided by 255"),
    "resample": FixedField(3, (3,), "pictures are resized by the bicubic filter"),
    **{
        name: FixedField(None, (None, False), "the family cuts and fills no picture")
        for name in ("do_center_crop", "crop_size", "do_pad", "pad_size")
    },
    **{
        name: UnusedField("how the library runs the same computation")
        for name in (
            *("image_processor_type", "feature_extractor_type", "processor_class", "data_format", "input_data_format"),
            *("default_to_square", "device", "disable_grouping", "return_tensors", "image_seq_length", "auto_map"),
        )
    },
}
PREPARATION = PublicForm(architecture="", model_type="", fields=FIELDS, settings=_settings)
