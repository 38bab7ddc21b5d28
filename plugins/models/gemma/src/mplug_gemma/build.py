"""From the config to a model: a decoder, or a tower with a decoder, and the plan."""

from collections.abc import Iterator
from dataclasses import replace

from mplug import RETURNS, Inits, Model, Plan, Stream, Unit, describe
from mplug_gemma.config import GemmaConfig
from mplug_gemma.tower import SeeingDecoder, Tower
from mplug_gemma.vision import CONTEXT, PATCHES, VisionConfig
from mplug_nn import Head, build_decoder, decoder_plan, refuse_base

GROUPS = "position_groups"

WITHOUT = (
    "use a data plugin that supplies images (--data mock --set data.media=2), or train a decoder of text "
    "(--set model.vision=null)"
)
"""What to do without images."""


def build(config: GemmaConfig, *, has_images: bool) -> Model:
    """The model on the meta device, and its plan.

    Without images, the units of inference leave the tower out, and attention has no groups.
    """
    if config.vision is None:
        return build_decoder(config)
    refuse_base(config, "a model with a tower of pictures")
    size, embedding = config.hidden_size, config.embedding_config()
    decoder = SeeingDecoder(
        embedding.build(config.vocab_size, size),
        (block.build(size) for block in (config if has_images else config.of_text()).blocks),
        Head(config.norm_config().build(size), size, config.vocab_size, config.output_soft_cap),
        Tower(config.vision, size),
        tied=embedding.tied,
    )
    plan = decoder_plan(decoder, Inits.normal(config.init_std, config.residual_init_std))
    return Model(
        decoder, replace(_with_tower(plan, decoder, config.vision, has_images), external=config.external_names())
    )


def _with_tower(plan: Plan, decoder: SeeingDecoder, config: VisionConfig, has_images: bool) -> Plan:
    """The plan of the decoder with the units of the tower and the join."""
    described = describe(decoder.tower, Inits.normal(config.init_std, config.init_std / (2 * config.num_layers) ** 0.5))
    return replace(
        plan,
        units=tuple(_units(plan.units, config)),
        inference=tuple(_units(plan.inference, config)) if has_images else plan.inference,
        parameters={**plan.parameters, **{f"tower.{name}": one for name, one in described.parameters.items()}},
        flops=plan.flops.without(described.flops),
        context={**plan.context, **CONTEXT},
        activations={
            **plan.activations,
            "patch_hidden": ("packs", PATCHES, "vision_embed"),
            "vision": ("packs", "pooled", "embed"),
        },
        streams={PATCHES: _stream(config)},
    )


def _stream(config: VisionConfig) -> Stream:
    """The patches; the segments are pictures, and the groups are the squares whose mean is one row."""
    number, images = config.num_patches, config.typical_images
    return Stream(
        ("patch_lengths",),
        group=config.pool_side**2,
        indices=("vision_rows",),
        rows=images * number,
        squares=images * number**2,
        remedy=WITHOUT,
    )


def _units(decoder: tuple[Unit, ...], config: VisionConfig) -> Iterator[Unit]:
    """The units of the tower, then those of the decoder with the join behind the embedding."""
    hidden = ("patch_hidden",)
    yield Unit("tower.patches", ("patches", "patch_places"), hidden, sequence=PATCHES)
    inputs = ("patch_hidden", "patch_places", "keys", "patch_lengths")
    for number in range(config.num_layers):
        yield Unit(f"tower.blocks.{number}", inputs, hidden, sequence=PATCHES)
    yield Unit("tower.projector", hidden, ("vision",), sequence=PATCHES)
    for unit in decoder:
        is_block = unit.name.startswith("blocks.")
        yield replace(unit, optional=(*unit.optional, GROUPS)) if is_block else unit
        if unit.name == "embedding":
            yield Unit("join", ("hidden", "vision", "vision_rows"), ("hidden",), optional=(RETURNS,))
