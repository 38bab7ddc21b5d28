"""Import a Megatron-LM checkpoint of a dense decoder (GPT, Llama) into a run of ours."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mplug import Model, Placement, UsageError, quoted
from mplug_megatron_format.folder import MegatronFolder
from mplug_pretrained import Factor, ForeignCheckpoint, ForeignTensor, Link, Part

if TYPE_CHECKING:
    from mplug import RunConfig

Dims = tuple[tuple[Factor, ...], ...]
Shape = tuple[int, ...]
WEIGHT = "weight"
WHOLE = {
    "embedding.token.weight": ("embedding.word_embeddings.weight",),
    "embedding.position.weight": ("embedding.position_embeddings.weight",),
    "head.norm.weight": ("decoder.final_layernorm.weight", "decoder.final_norm.weight"),
    "head.norm.bias": ("decoder.final_layernorm.bias", "decoder.final_norm.bias"),
    "head.project.weight": ("output_layer.weight",),
}
BLOCK = {
    "norm1.weight": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "norm1.bias": ("self_attention.linear_qkv.layer_norm_bias", "input_layernorm.bias"),
    "attn.qkv.weight": ("self_attention.linear_qkv.weight",),
    "attn.qkv.bias": ("self_attention.linear_qkv.bias",),
    "attn.out.weight": ("self_attention.linear_proj.weight",),
    "attn.out.bias": ("self_attention.linear_proj.bias",),
    "attn.q_norm": ("self_attention.q_layernorm.weight",),
    "attn.k_norm": ("self_attention.k_layernorm.weight",),
    "norm2.weight": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    "norm2.bias": ("mlp.linear_fc1.layer_norm_bias", "pre_mlp_layernorm.bias"),
    "mlp.up.weight": ("mlp.linear_fc1.weight",),
    "mlp.up.bias": ("mlp.linear_fc1.bias",),
    "mlp.down.weight": ("mlp.linear_fc2.weight",),
    "mlp.down.bias": ("mlp.linear_fc2.bias",),
}
"""Our parameter (of a block: relative to it) -> the names that versions of Megatron give it."""
PADDED = ("embedding.token.weight", "head.project.weight")
"""Megatron may append rows to the vocabulary."""
NO_WEIGHTS = ("_extra_state", "optimizer.", "rng_state", "rerun_state", "opt_param_scheduler")
"""Parts of names of tensors that are no weights."""


class MegatronCheckpoint(ForeignCheckpoint):
    """A checkpoint in the format `torch_dist`. Its optimizer states are not read."""

    def __init__(self, folder: Path) -> None:
        self._folder = MegatronFolder(folder)
        self.path = self._folder.path
        self.tensors = {
            name: ForeignTensor(shape)
            for name, shape in self._folder.shapes.items()
            if not any(part in name for part in NO_WEIGHTS)
        }

    def read(self, tensor: str, start: Shape, shape: Shape, state: str = WEIGHT, part: int = 0) -> Tensor:
        """A box of a weight."""
        assert (state, part) == (WEIGHT, 0)
        return self._folder.read(tensor, start, shape)

    def links(self, model: Model) -> Mapping[str, Sequence[Link]]:
        """The regions of Megatron's tensors, which may be stacked over layers, and whose vocabulary may be padded."""
        return {name: [*_links(name, one, self._folder.shapes)] for name, one in model.placements.items()}

    def compare(self, config: "RunConfig") -> Sequence[str]:
        """Compare the arguments of the Megatron run, if the checkpoint has them, with the section 'model'."""
        if not callable(getattr(config.model, "norm_config", None)):
            raise UsageError(
                f"'{config.settings['model', 'name'].value}' is no decoder, so no Megatron checkpoint fits it"
            )
        refuse_other_arguments(config.model, self._folder.arguments)
        if self._folder.arguments:
            return ()
        return ("it has no arguments, so only the shapes were compared with the model",)


def _links(name: str, placement: Placement, shapes: Mapping[str, Shape]) -> Iterator[Link]:
    """The links of a parameter; none if the checkpoint has no tensor for it."""
    own = name.split(".", 2)
    if own[0] == "blocks" and len(own) == 3:
        candidates, number = BLOCK.get(own[2], ()), int(own[1])
        stacked = {f"decoder.layers.{one}": f"decoder.layers.{number}.{one}" for one in candidates}
    else:
        stacked, number = {one: one for one in WHOLE.get(name, ())}, 0
    for together, alone in stacked.items():
        for prefix in ("", "model.", "module."):
            for tensor in dict.fromkeys((f"{prefix}{together}", f"{prefix}{alone}")):
                if tensor in shapes:
                    shape = shapes[tensor]
                    is_stacked = len(shape) > len(placement.shape)
                    outer: Dims = ((Factor("layer", shape[0], number, 1),),) if is_stacked else ()
                    rows = shape[0] if name in PADDED else placement.shape[0]
                    for ours, theirs in _maps(name, placement, max(rows, placement.shape[0])):
                        yield Link(Part(name, ours), Part(tensor, (*outer, *theirs)))
                    return


def _maps(name: str, placement: Placement, rows: int) -> Iterator[tuple[Dims, Dims]]:
    """(our factors, theirs without the layers) of a parameter; `rows` are the rows of their tensor."""
    inner = tuple((Factor(str(dim), size),) for dim, size in enumerate(placement.shape) if dim)
    if not name.endswith(("attn.qkv.weight", "attn.qkv.bias")):
        first = Factor("0", placement.shape[0])
        yield ((first,), *inner), ((Factor("0", rows, 0, first.size),), *inner)
        return
    heads, groups = placement.dims[0][0].count, placement.dims[0][1].count
    shared, width = heads // groups, Factor("k", placement.dims[0][0].width)
    starts = [*((number, shared) for number in range(shared)), (heads, 1), (heads + groups, 1)]
    for place, (start, step) in enumerate(starts):  # each group: its queries, a key, a value
        ours = (Factor("group", heads + 2 * groups, start, groups, step), width)
        yield (ours, *inner), ((Factor("group", groups), Factor("in", shared + 2, place, 1), width), *inner)


def refuse_other_arguments(config: Any, arguments: Mapping[str, Any]) -> None:
    """Raise UsageError if the arguments of the Megatron run contradict the section 'model'; the error lists all."""
    heads = arguments.get("num_attention_heads")
    grouped = arguments.get("group_query_attention", True)
    wanted = {
        "num_layers": ("num_layers", arguments.get("num_layers")),
        "hidden_size": ("hidden_size", arguments.get("hidden_size")),
        "num_attention_heads": ("num_attention_heads", heads),
        "num_kv_heads": ("kv_heads", arguments.get("num_query_groups") if grouped else heads),
        "rope_theta": ("rope_theta", arguments.get("rotary_base") if config.has_rotary_positions else None),
        "norm_eps": ("norm_eps", arguments.get("norm_epsilon", arguments.get("layernorm_epsilon"))),
    }
    lines = [
        f"  model.{field}: {quoted(getattr(config, name))}, but the checkpoint has {quoted(value)}"
        for field, (name, value) in wanted.items()
        if value is not None and getattr(config, name) != value
    ]
    kind = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}.get(str(arguments.get("normalization")))
    if kind is not None and config.norm_config().kind != kind:
        lines.append(f"  the norm is {config.norm_config().kind}, but the checkpoint has {kind}")
    for argument, needed in (("rotary_interleaved", False), ("rotary_percent", 1.0), ("apply_layernorm_1p", False)):
        if arguments.get(argument, needed) != needed:
            lines.append(f"  the checkpoint has {argument}={arguments[argument]}, which is not supported")
    if lines:
        raise UsageError("\n".join(["settings contradict the arguments of the Megatron run:", *lines]))
