"""How the folders of Qwen-VL say that pictures and videos are resized and standardised. Imports no torch."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from mplug_nn import FixedField, PublicField, PublicForm, ReadField, UnusedField, Values
from mplug_nn.vision.tower import colours_of

VISION = "vision"
"""Our section of the tower."""
SIZE = Values.integer().or_null
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""The library's values if a file states none."""
HALF = (0.5, 0.5, 0.5)
Colours = tuple[float, float, float]
SHORTEST, LONGEST = 56 * 56, 28 * 28 * 1280
"""The library's smallest and largest area of a picture in pixels."""
COLOURS = Values.colours()
OURS = {"patch_size": "patch_size", "temporal_patch_size": "patch_frames", "merge_size": "merge_size"}
"""Fields that the tower of config.json must have too."""
ALWAYS = "the family always does it"


def _shared(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that pictures and videos share."""
    return {**colours_of(values), **{ours: values[theirs] for theirs, ours in OURS.items()}}


def _bounds(values: Mapping[str, Any], least: int, most: int) -> tuple[int, int]:
    """The smallest and the largest area, by default `least` and `most`."""
    size = values["size"] or {}
    if unknown := sorted(set(size) - {"shortest_edge", "longest_edge"}):
        raise ValueError(f"its field 'size' has {unknown}, and the family reads 'shortest_edge' and 'longest_edge'")
    bounds = {
        "shortest_edge": values["min_pixels"] or size.get("shortest_edge") or least,
        "longest_edge": values["max_pixels"] or size.get("longest_edge") or most,
    }
    for name, value in bounds.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"its field 'size' has {value!r} as {name}, which must be an integer of at least 1")
    return bounds["shortest_edge"], bounds["longest_edge"]


def _of_pictures(values: Mapping[str, Any]) -> dict[str, Any]:
    least, most = _bounds(values, SHORTEST, LONGEST)
    return {VISION: {"min_pixels": least, "max_pixels": most, **_shared(values)}}


def _of_videos(side: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """`side` is that of a square of patches in the library's default bounds."""
    least, most = _bounds(values, 128 * side**2, 768 * side**2)
    return {VISION: {"video_min_pixels": least, "video_max_pixels": most, **_shared(values)}}


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
OF_VIDEOS: dict[str, PublicField] = {
    **FIELDS,
    "cap_pixels_per_frame": FixedField(None, (None, False), "the family bounds frames as the library does by default"),
    **{
        name: UnusedField("frames of videos are given; the family samples none")
        for name in ("do_sample_frames", "fps", "num_frames", "min_frames", "max_frames", "max_duration")
    },
    **{
        name: UnusedField("how the library runs the same computation")
        for name in (
            *("video_processor_type", "video_metadata", "return_metadata", "max_video_tokens", "max_image_size"),
            *("model_valid_processing_keys", "_valid_kwargs_names", "size_divisor", "use_token_compression"),
        )
    },
}
PICTURES = PublicForm(architecture="", model_type="", fields=FIELDS, settings=_of_pictures)


def _preparations(patch: int, mean: Colours, std: Colours) -> dict[str, PublicForm]:
    """The forms by the names of their files, with the library's defaults for videos of a generation."""
    own = {"patch_size": ReadField(patch, Values.integer()), "image_mean": ReadField(mean, COLOURS)}
    fields = {**OF_VIDEOS, **own, "image_std": ReadField(std, COLOURS)}
    videos = PublicForm(architecture="", model_type="", fields=fields, settings=partial(_of_videos, 2 * patch))
    return {"preprocessor_config.json": PICTURES, "video_preprocessor_config.json": videos}


SECOND_FILES, THIRD_FILES = _preparations(14, CLIP_MEAN, CLIP_STD), _preparations(16, HALF, HALF)
"""How folders of Qwen2.5-VL and Qwen3-VL prepare media; without the second file, videos are prepared by the first."""
