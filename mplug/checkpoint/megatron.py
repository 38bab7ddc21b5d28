"""Import a Megatron-LM checkpoint of a dense decoder (GPT, Llama) into a run of ours."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import torch
from torch import Tensor

from mplug.checkpoint.export import write_safetensors
from mplug.checkpoint.manifest import TensorTable, encode, name_in_file
from mplug.checkpoint.megatron_folder import MegatronFolder
from mplug.checkpoint.names import MANIFEST, file_of, partial_path, path_of
from mplug.checkpoint.public_folder import some
from mplug.checkpoint.storage import crc32
from mplug.checkpoint.transfer import fill_ours
from mplug.errors import UsageError, quoted
from mplug.files import sync_path, write_whole
from mplug.layout.external import Dims, Factor, Link, Part
from mplug.layout.placement import Placement
from mplug.model.model import Model
from mplug.run.record import provenance
from mplug.run.run import Run

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


def megatron_links(model: Model, folder: MegatronFolder) -> dict[str, tuple[Link, ...]]:
    """The links of every parameter. UsageError unless the checkpoint has exactly the parameters of the model."""
    links, missing, wrong = dict[str, tuple[Link, ...]](), list[str](), list[str]()
    for name, placement in model.placements.items():
        found = [*_links(name, placement, folder)]
        if not found:
            missing.append(name)
        for link in found:
            shape = folder.shapes[link.theirs.tensor]
            if link.theirs.shape != shape:
                wrong.append(f"'{link.theirs.tensor}' has shape {shape}, but '{name}' needs {link.theirs.shape}")
        links[name] = tuple(found)
    used = {link.theirs.tensor for of_one in links.values() for link in of_one}
    unused = [n for n in folder.shapes if n not in used and not any(part in n for part in NO_WEIGHTS)]
    problems = [f"it has no counterpart of {some(missing)}"] if missing else []
    problems += [f"the model does not use {some(unused)}"] if unused else []
    if problems or wrong:
        raise UsageError(
            f"'{folder.path}' does not fit the model: {'; '.join([*problems, *wrong[:1]])}; set the section 'model' to "
            f"that of the checkpoint"
        )
    return links


def _links(name: str, placement: Placement, folder: MegatronFolder) -> Iterator[Link]:
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
                if tensor in folder.shapes:
                    shape = folder.shapes[tensor]
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


def import_megatron(run: Run, model: Model, folder: MegatronFolder) -> None:
    """Write the checkpoint of step 0 of a run, parameter by parameter."""
    links, final = megatron_links(model, folder), path_of(run.checkpoints, 0)
    partial, file = partial_path(final), file_of(0)
    partial.mkdir(parents=True)
    dtype = run.precision.masters
    tensors, entries = dict[str, Any](), []
    for name, placement in model.placements.items():
        start, shape = (0,) * len(placement.shape), placement.shape
        tensors[f"{name}/weight"] = {"shape": list(shape), "dtype": dtype, "chunks": [[file, list(start), list(shape)]]}
        entries.append((name_in_file(f"{name}/weight", start), dtype, shape, name))

    def produce(name: str) -> Tensor:
        values = torch.empty(model.placements[name].shape, dtype=getattr(torch, dtype))
        fill_ours(links[name], (0,) * values.dim(), values, folder.read)
        return values

    write_safetensors(partial / file, entries, produce)
    path = partial / file
    facts = {
        "step": 0,
        "samples": 0,
        "tokens": 0,
        "loader": {},
        "states": {},
        "layout": "",
        "world_size": 1,
        "saved": datetime.now().astimezone().isoformat(timespec="seconds"),
        "provenance": provenance(run),
        "config": run.config.resolved(),
        "files": {file: {"bytes": path.stat().st_size, "crc32": crc32(path)}},
    }
    write_whole(partial / MANIFEST, encode(facts, TensorTable.of(tensors)))
    sync_path(partial)
    partial.rename(final)
    sync_path(final.parent)
