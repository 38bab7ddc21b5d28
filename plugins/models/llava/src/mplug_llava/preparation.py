"""How the folders of LLaVA-OneVision say that pictures and videos are tiled and standardised. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from mplug_llava.tiling import TilingConfig
from mplug_nn import FixedField, PublicField, PublicForm, ReadField, UnusedField, Values

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""The library's values if a file states none."""
ALWAYS = "the family always does it"


def _is_colours(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3 and all(type(one) in (int, float) for one in value)


COLOURS = Values(_is_colours, "a list of three numbers")


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, list | tuple) and len(one) == 2 for one in value)


def _side(values: Mapping[str, Any]) -> int:
    size = values["size"]
    if set(size) != {"height", "width"} or size["height"] != size["width"]:
        raise ValueError(f"its field 'size' is {size}, and the family reads equal 'height' and 'width'")
    side: int = size["height"]
    return side


def _of_pictures(values: Mapping[str, Any]) -> dict[str, Any]:
    colours = {"pixel_mean": tuple(values["image_mean"]), "pixel_std": tuple(values["image_std"])}
    resolutions = tuple(map(tuple, values["image_grid_pinpoints"]))
    return {"vision": {"image_size": _side(values), **colours}, "tiling": {"resolutions": resolutions}}


def _of_videos(values: Mapping[str, Any]) -> dict[str, Any]:
    colours = {"video_mean": tuple(values["image_mean"]), "video_std": tuple(values["image_std"])}
    return {"vision": {"image_size": _side(values)}, "tiling": colours}


SHARED: dict[str, PublicField] = {
    "size": ReadField({"height": 384, "width": 384}, Values.mapping()),
    "image_mean": ReadField(CLIP_MEAN, COLOURS),
    "image_std": ReadField(CLIP_STD, COLOURS),
    **{name: FixedField(True, (True,), ALWAYS) for name in ("do_resize", "do_rescale", "do_normalize")},
    "do_convert_rgb": FixedField(True, (True, None), ALWAYS),
    "rescale_factor": FixedField(1 / 255, (1 / 255,), "colours are divided by 255"),
    "resample": FixedField(3, (3,), "pictures are resized by the bicubic filter"),
    **{
        name: FixedField(None, (None, False), "the family cuts nothing off a picture")
        for name in ("do_center_crop", "crop_size", "pad_size")
    },
    **{
        name: UnusedField("how the library runs the same computation")
        for name in (
            *("image_processor_type", "feature_extractor_type", "processor_class", "data_format", "input_data_format"),
            *("default_to_square", "device", "disable_grouping", "return_tensors", "image_seq_length", "auto_map"),
            "do_pad",  # tiles of several pictures in one tensor
        )
    },
}
FIELDS: dict[str, PublicField] = {
    **SHARED,
    "image_grid_pinpoints": ReadField(TilingConfig().resolutions, Values(_is_sizes, "a list of heights and widths")),
}
OF_VIDEOS: dict[str, PublicField] = {
    **SHARED,
    **{
        name: UnusedField("frames of videos are given; the family samples none")
        for name in ("do_sample_frames", "fps", "num_frames")
    },
    **{
        name: UnusedField("how the library runs the same computation")
        for name in ("video_processor_type", "video_metadata", "return_metadata")
    },
    **{
        name: UnusedField("the library reads it of pictures only")
        for name in ("image_grid_pinpoints", "model_valid_processing_keys", "_valid_kwargs_names")
    },
}
PREPARATION = {
    "preprocessor_config.json": PublicForm(architecture="", model_type="", fields=FIELDS, settings=_of_pictures),
    "video_preprocessor_config.json": PublicForm(architecture="", model_type="", fields=OF_VIDEOS, settings=_of_videos),
}
"""The forms by the names of their files; without the second file, videos are prepared by the first."""
