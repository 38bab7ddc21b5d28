"""From the config to a model: a decoder, or a tower with a decoder, and the plan."""

from collections.abc import Iterator
from dataclasses import replace

from mplug import RETURNS, Description, Inits, Model, Plan, Stream, Unit, describe
from mplug_nn import Head, build_decoder, decoder_plan, refuse_base
from mplug_qwen_vl.config import QwenVLConfig
from mplug_qwen_vl.tower import SeeingDecoder, Tower
from mplug_qwen_vl.vision import CONTEXT, PATCHES, VisionConfig, entries_of

WITHOUT = (
    "use a data plugin that supplies images (--data mock --set data.media=2), or train a decoder of text "
    "(--set model.vision=null)"
)
"""What to do without images."""


def build(config: QwenVLConfig, *, has_images: bool) -> Model:
    """The model on the meta device, and its plan. Without images, the units of inference leave the tower out."""
    if config.vision is None:
        return build_decoder(config)
    refuse_base(config, "a model with a tower of pictures")
    size, embedding = config.hidden_size, config.embedding_config()
    decoder = SeeingDecoder(
        embedding.build(config.vocab_size, size),
        (block.build(size) for block in config.blocks),
        Head(config.norm_config().build(size), size, config.vocab_size, config.output_soft_cap),
        Tower(config.vision, size),
        tied=embedding.tied,
    )
    plan = decoder_plan(decoder, Inits.normal(config.init_std, config.residual_init_std))
    return Model(
        decoder, replace(_with_tower(plan, decoder, config.vision, has_images), external=config.external_names())
    )


def _with_tower(plan: Plan, decoder: SeeingDecoder, config: VisionConfig, has_images: bool) -> Plan:
    """The plan of the decoder with the units of the tower and the joins."""
    described = _described(decoder.tower, config)
    activations = {
        **plan.activations,
        "patch_hidden": ("packs", PATCHES, "vision_embed"),
        **dict.fromkeys(("vision", *_added(config)), ("packs", "merged", "embed")),
    }
    return replace(
        plan,
        units=tuple(_units(plan.units, config)),
        inference=tuple(_units(plan.inference, config)) if has_images else plan.inference,
        parameters={**plan.parameters, **{f"tower.{name}": one for name, one in described.parameters.items()}},
        flops=plan.flops.without(described.flops),
        context={**plan.context, **{name: CONTEXT[name] for name in entries_of(config)}},
        activations=activations,
        streams={PATCHES: _stream(config)},
    )


def _stream(config: VisionConfig) -> Stream:
    """The patches; those of a sample are counted as one frame."""
    lengths = tuple(name for name in ("patch_lengths", "window_lengths") if name in entries_of(config))
    number = config.typical_patches
    group, indices = config.merge_size**2, ("vision_rows",)
    return Stream(lengths, group=group, indices=indices, rows=number, squares=number**2, remedy=WITHOUT)


def _described(tower: Tower, config: VisionConfig) -> Description:
    """The tower's parameters and FLOPs, with initial values by the tower's own depth."""
    return describe(tower, Inits.normal(config.init_std, config.init_std / float((2 * config.num_layers) ** 0.5)))


def _added(config: VisionConfig) -> list[str]:
    """The activations that DeepStack adds after the first decoder blocks, in order."""
    return [f"deepstack_{place}" for place, _ in enumerate(config.deepstack_blocks)]


def _units(decoder: tuple[Unit, ...], config: VisionConfig) -> Iterator[Unit]:
    """The units of the tower, then those of the decoder with the joins between them."""
    yield from _tower_units(config)
    joins = {"embedding": _join("join", "vision")}
    for place, added in enumerate(_added(config)):
        joins[f"blocks.{place}"] = _join(f"deepstack.{place}", added)
    for unit in decoder:
        is_block = unit.name.startswith("blocks.")
        yield replace(unit, optional=(*unit.optional, "coordinates")) if is_block else unit
        if unit.name in joins:
            yield joins[unit.name]


def _join(name: str, rows: str) -> Unit:
    """The unit that joins `rows` of the tower with the tokens."""
    return Unit(name, ("hidden", rows, "vision_rows"), ("hidden",), optional=(RETURNS,))


def _tower_units(config: VisionConfig) -> Iterator[Unit]:
    hidden = ("patch_hidden",)
    yield Unit("tower.patches", ("patches", "patch_places"), hidden, sequence=PATCHES)
    for number in range(config.num_layers):
        lengths = "window_lengths" if config.has_window(number) else "patch_lengths"
        inputs = ("patch_hidden", "patch_places", "keys", lengths)
        yield Unit(f"tower.blocks.{number}", inputs, hidden, sequence=PATCHES)
        if number in config.deepstack_blocks:
            place = config.deepstack_blocks.index(number)
            yield Unit(f"tower.deepstack.{place}", hidden, (f"deepstack_{place}",), sequence=PATCHES)
    yield Unit("tower.merger", hidden, ("vision",), sequence=PATCHES)
