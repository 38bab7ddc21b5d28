"""From the config and the decoder's model to the whole model and its plan."""

from collections.abc import Iterator
from dataclasses import replace

from mplug import RETURNS, Inits, Model, Plan, Stream, Unit, UsageError, describe
from mplug_llava.config import LlavaConfig
from mplug_llava.names import external_names, tower_names
from mplug_llava.tower import GridJoin, Projector, SeeingModel, Tower
from mplug_llava.vision import PATCHES, TILED_CONTEXT, VisionConfig
from mplug_nn import StreamJoin, plan_within

DECODER = "decoder"


def build(config: LlavaConfig, decoder: Model, *, has_images: bool) -> Model:
    """The model on the meta device, and its plan. Without images, the units of inference leave the tower out."""
    vision, label = config.vision, config.decoder.label
    _refuse_unfit(decoder.plan, label)
    projector = Projector(vision, config.hidden_size, config.projector_activation, config.projector_bias)
    join = StreamJoin() if config.tiling is None else GridJoin(config.hidden_size)
    module = SeeingModel(Tower(vision, projector), join, decoder.module)
    described = describe(
        module.tower, Inits.normal(vision.init_std, vision.init_std / float((2 * vision.used_layers) ** 0.5))
    )
    of_join = describe(join, Inits.normal(config.hidden_size**-0.5, 0.0))
    inner = plan_within(decoder.plan, DECODER)
    rows = ("vision_rows",) if config.tiling is None else ("vision_rows", "vision_shares")
    plan = replace(
        inner,
        units=tuple(_units(inner.units, vision, rows, label)),
        inference=tuple(_units(inner.inference, vision, rows, label)) if has_images else inner.inference,
        parameters={
            **inner.parameters,
            **{f"tower.{name}": one for name, one in described.parameters.items()},
            **{f"join.{name}": one for name, one in of_join.parameters.items()},
        },
        buffers={**inner.buffers, **{f"tower.{name}": one for name, one in described.buffers.items()}},
        context={**inner.context, **config.context},
        activations={
            **inner.activations,
            "patch_hidden": ("packs", PATCHES, "vision_embed"),
            "vision": ("packs", PATCHES, "embed"),
        },
        streams={PATCHES: _stream(vision, config.decoder.name)},
        external=external_names(config, inner.external),
        parts={"vision": tower_names(vision), **({"decoder": inner.external} if inner.external else {})},
    )
    return Model(module, plan)


def _refuse_unfit(plan: Plan, label: str) -> None:
    """Raise UsageError for a decoder whose plan has what a tower cannot be joined to."""
    reasons = {
        "reads a stream of its own": bool(plan.streams),
        "predicts tokens further ahead, which may be those of a picture": bool(plan.shifted),
        "has entries or activations with the names of those of pictures": bool(
            {*TILED_CONTEXT, "patch_hidden", "vision"} & {*plan.context, *plan.activations}
        ),
        "states its FLOPs by hand (Plan.work)": plan.work is not None,
    }
    for reason, applies in reasons.items():
        if applies:
            raise UsageError(f"model.decoder: {label} {reason}; use another decoder, or other settings of it")


def _stream(config: VisionConfig, decoder: str) -> Stream:
    rows, number = config.num_rows, config.typical_pictures
    return Stream(
        ("patch_lengths",),
        indices=("vision_rows",),
        rows=number * rows,
        squares=number * rows**2,
        remedy=f"use a data plugin that supplies images (--data mock --set data.media=2), or train the decoder alone "
        f"(--model {decoder})",
    )


def _units(decoder: tuple[Unit, ...], config: VisionConfig, rows: tuple[str, ...], label: str) -> Iterator[Unit]:
    """The units of the tower, then those of the decoder, with the join after the one that embeds tokens."""
    embedding = [unit for unit in decoder if "tokens" in unit.inputs]
    if len(embedding) != 1 or len(embedding[0].outputs) != 1:
        raise UsageError(
            f"model.decoder: {label} has {len(embedding)} units that take 'tokens', and a join needs one with one "
            f"output; use another decoder"
        )
    yield from _tower_units(config)
    for unit in decoder:
        yield unit
        if unit is embedding[0]:
            yield Unit("join", (*unit.outputs, "vision", *rows), unit.outputs, optional=(RETURNS,))


def _tower_units(config: VisionConfig) -> Iterator[Unit]:
    hidden = ("patch_hidden",)
    yield Unit("tower.patches", ("patches", "patch_places"), hidden, sequence=PATCHES)
    for number in range(config.used_layers):
        inputs = ("patch_hidden", "patch_places", "keys", "patch_lengths")
        yield Unit(f"tower.blocks.{number}", inputs, hidden, sequence=PATCHES)
    yield Unit("tower.projector", hidden, ("vision",), sequence=PATCHES)
