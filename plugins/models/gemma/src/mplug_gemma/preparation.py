"""The preprocessor_config.json of Gemma 3: how pictures are resized, cropped and standardised. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from mplug_gemma.vision import PanAndScan
from mplug_nn import FixedField, PublicField, PublicForm, ReadField, UnusedField, Values
from mplug_nn.vision.tower import colours_of, square_side

ALWAYS = "the family always does it"
SIZE = Values.integer().or_null
CROPS = {
    "pan_and_scan_min_crop_size": "min_crop_size",
    "pan_and_scan_max_num_crops": "max_crops",
    "pan_and_scan_min_ratio_to_activate": "min_ratio",
}
"""The field of an option of pan and scan -> ours; null means the library's default, which is ours too."""
COLOURS = Values.colours()


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    side, tokens = square_side(values), values["image_seq_length"]
    options = {ours: values[theirs] for theirs, ours in CROPS.items() if values[theirs] is not None}
    crops = PanAndScan(**options).model_dump() if values["do_pan_and_scan"] else None
    numbers = {} if tokens is None else {"tokens_per_image": tokens}
    return {"vision": {"image_size": side, **colours_of(values), **numbers, "pan_and_scan": crops}}


FIELDS: dict[str, PublicField] = {
    "size": ReadField({"height": 224, "width": 224}, Values.mapping()),
    "image_mean": ReadField((0.5, 0.5, 0.5), COLOURS),
    "image_std": ReadField((0.5, 0.5, 0.5), COLOURS),
    "image_seq_length": ReadField(None, SIZE),
    "do_pan_and_scan": ReadField(None, Values.flag().or_null),
    "pan_and_scan_min_crop_size": ReadField(None, SIZE),
    "pan_and_scan_max_num_crops": ReadField(None, SIZE),
    "pan_and_scan_min_ratio_to_activate": ReadField(None, Values.positive().or_null),
    **{name: FixedField(True, (True,), ALWAYS) for name in ("do_resize", "do_rescale", "do_normalize")},
    "do_convert_rgb": FixedField(True, (True, None), ALWAYS),
    "rescale_factor": FixedField(1 / 255, (1 / 255,), "colours are divided by 255"),
    "resample": FixedField(2, (2,), "pictures are resized by the bilinear filter"),
    **{
        name: FixedField(None, (None, False), "the family fills no picture, and crops none but by pan and scan")
        for name in ("do_center_crop", "crop_size", "do_pad", "pad_size")
    },
    **{
        name: UnusedField("how the library runs the same computation")
        for name in (
            *("image_processor_type", "feature_extractor_type", "processor_class", "data_format", "input_data_format"),
            *("default_to_square", "device", "disable_grouping", "return_tensors", "auto_map"),
        )
    },
}
PREPARATION = PublicForm(architecture="", model_type="", fields=FIELDS, settings=_settings)
