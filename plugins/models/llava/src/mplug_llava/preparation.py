"""How folders of LLaVA say that pictures and videos are cut and standardised. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from mplug_llava.published_towers import CLIP_PREPARATION, SIGLIP_PREPARATION
from mplug_llava.tiling import TilingConfig
from mplug_nn import FixedField, PublicField, PublicForm, ReadField, UnusedField, Values
from mplug_nn.vision.tower import colours_of, square_side

CLIP_MEAN, CLIP_STD = CLIP_PREPARATION["pixel_mean"], CLIP_PREPARATION["pixel_std"]
"""The library's values if a file states none."""
ALWAYS = "the family always does it"
COLOURS = Values.colours()


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, list | tuple) and len(one) == 2 for one in value)


def _of_pictures(values: Mapping[str, Any]) -> dict[str, Any]:
    resolutions = tuple(map(tuple, values["image_grid_pinpoints"]))
    vision = {"image_size": square_side(values), **colours_of(values)}
    return {"vision": vision, "tiling": {"resolutions": resolutions}}


def _of_videos(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"vision": {"image_size": square_side(values)}, "tiling": colours_of(values, "video")}


EVERYWHERE: dict[str, PublicField] = {
    **{name: FixedField(True, (True,), ALWAYS) for name in ("do_resize", "do_rescale", "do_normalize")},
    "do_convert_rgb": FixedField(True, (True, None), ALWAYS),
    "rescale_factor": FixedField(1 / 255, (1 / 255,), "colours are divided by 255"),
    "resample": FixedField(3, (3,), "pictures are resized by the bicubic filter"),
    **{
        name: UnusedField("how the library runs the same computation")
        for name in (
            *("feature_extractor_type", "processor_class", "data_format", "input_data_format", "default_to_square"),
            *("device", "disable_grouping", "return_tensors", "image_seq_length", "auto_map"),
        )
    },
}
SHARED: dict[str, PublicField] = {
    **EVERYWHERE,
    "size": ReadField({"height": 384, "width": 384}, Values.mapping()),
    "image_mean": ReadField(CLIP_MEAN, COLOURS),
    "image_std": ReadField(CLIP_STD, COLOURS),
    **{
        name: FixedField(None, (None, False), "the family cuts nothing off a picture")
        for name in ("do_center_crop", "crop_size", "pad_size")
    },
    "image_processor_type": UnusedField("how the library runs the same computation"),
    "do_pad": UnusedField("tiles of several pictures in one tensor of the library"),
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


def _is_size(value: Any) -> bool:
    return value is None or isinstance(value, dict) or (type(value) is int and value > 0)


def _square(values: Mapping[str, Any], name: str, default: dict[str, int], *, whole: bool) -> tuple[bool, int]:
    """(whether both sides are given, side) of a field that is a mapping, or in older files a number."""
    given = default if values[name] is None else values[name]
    if isinstance(given, int):
        return whole, given
    sides = {*given.values()}
    if {*given} not in ({"shortest_edge"}, {"height", "width"}) or len(sides) != 1 or not _is_size(*sides):
        raise ValueError(
            f"its field '{name}' is {given}, and the family reads a 'shortest_edge', or equal 'height' and 'width'"
        )
    return "height" in given, sides.pop()


def _of_squares(values: Mapping[str, Any]) -> dict[str, Any]:
    """LLaVA-1.5: the middle of a picture whose shorter side is the square's (CLIP), or a stretched picture (SigLIP)."""
    kind = values["image_processor_type"]
    is_siglip = kind is not None and kind.startswith("Siglip")
    usual = SIGLIP_PREPARATION if is_siglip else CLIP_PREPARATION
    default = dict.fromkeys(("height", "width") if is_siglip else ("shortest_edge",), 224)
    stretches, side = _square(values, "size", default, whole=is_siglip)
    crops = not is_siglip if values["do_center_crop"] is None else values["do_center_crop"]
    if crops:
        is_square, cropped = _square(values, "crop_size", {"height": 224, "width": 224}, whole=True)
        if not is_square or cropped != side:
            raise ValueError(
                f"its fields 'size' and 'crop_size' are {values['size']} and {values['crop_size']}, and the family "
                f"supports a square whose side is that of 'size'"
            )
    elif not stretches:
        raise ValueError(f"its field 'do_center_crop' is false, but its 'size' is {values['size']}, which is no square")
    colours = {f"pixel_{name}": tuple(values[f"image_{name}"] or usual[f"pixel_{name}"]) for name in ("mean", "std")}
    return {"vision": {"image_size": side, "fit": "stretch" if stretches else "crop", **colours}}


SIZES = Values(_is_size, "a mapping, or a number of pixels")
PROCESSORS = Values.one_of(
    *(name + kind for name in ("CLIP", "Llava", "Siglip") for kind in ("ImageProcessor", "ImageProcessorFast")),
    *("CLIPImageProcessorPil", "LlavaImageProcessorPil", "SiglipImageProcessorPil"),
)
OF_SQUARES: dict[str, PublicField] = {
    **EVERYWHERE,
    "image_processor_type": ReadField(None, PROCESSORS.or_null),
    **dict.fromkeys(("size", "crop_size"), ReadField(None, SIZES)),
    **dict.fromkeys(("image_mean", "image_std"), ReadField(None, COLOURS.or_null)),
    "do_center_crop": ReadField(None, Values.flag().or_null),
    **dict.fromkeys(("do_pad", "pad_size"), FixedField(None, (None, False), "the family fills no picture")),
}
SQUARES = {
    "preprocessor_config.json": PublicForm(architecture="", model_type="", fields=OF_SQUARES, settings=_of_squares)
}
"""The form of LLaVA-1.5's file."""
TILES = {
    "preprocessor_config.json": PublicForm(architecture="", model_type="", fields=FIELDS, settings=_of_pictures),
    "video_preprocessor_config.json": PublicForm(architecture="", model_type="", fields=OF_VIDEOS, settings=_of_videos),
}
"""LLaVA-OneVision's forms by the names of their files; without the second file, videos are prepared by the first."""
