"""Layers for multi-token prediction in a published folder, and tensors that other releases name otherwise."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from changed_folders import EMBEDDING, HEAD, TOKENS, Folder, changed, layer_after_the_last, put
from published import Made, edited, loaded, logits, tensors

from mplug.errors import UsageError

# The layer for multi-token prediction: the one after the last.


def prediction_layer(found: dict[str, Tensor]) -> None:
    """A copy of the last layer times 2, and copies of the embedding and of the head. The library writes none."""
    layer_after_the_last(found)
    found |= {name: one * 2 for name, one in found.items() if name.startswith("model.layers.4.")}
    for name, shape in (("enorm", (32,)), ("hnorm", (32,)), ("shared_head.norm", (32,)), ("eh_proj", (32, 64))):
        found[f"model.layers.4.{name}.weight"] = torch.randn(shape)
    found["model.layers.4.embed_tokens.weight"] = found[EMBEDDING].clone()
    found["model.layers.4.shared_head.head.weight"] = found[HEAD].clone()


@pytest.mark.wide("families")
def test_the_layer_for_multi_token_prediction_is_read_if_the_model_has_one(folder: Folder, models: Made) -> None:
    path = changed(folder("deepseek-v3"), prediction_layer)
    assert not [name for name in loaded(path)[1].parameters() if name.startswith("ahead.")]
    own, stored = loaded(path, model__num_mtp_layers=1)[1].parameters(), tensors(path)
    assert torch.equal(own["ahead.depths.0.merge.weight"], stored["model.layers.4.eh_proj.weight"][1])
    assert torch.equal(own["ahead.depths.0.norm.weight"], stored["model.layers.4.shared_head.norm.weight"][1])
    for name in ("attn.kv_up.weight", "moe.experts.up", "norm2.weight"):
        assert torch.equal(own[f"ahead.depths.0.block.{name}"], 2 * own[f"blocks.3.{name}"])
    with pytest.raises(UsageError, match=r"it lacks 'model.layers.4.eh_proj.weight'"):
        loaded(models["deepseek-v3"][0], model__num_mtp_layers=1)
    for part, other in (("embed_tokens", EMBEDDING), ("shared_head.head", HEAD)):
        copy = f"model.layers.4.{part}.weight"
        changed(path, lambda found, copy=copy: found[copy].mul_(2))
        loaded(path, model__num_mtp_layers=0)
        with pytest.raises(UsageError, match=f"'{copy}' and '{other}' have different values"):
            loaded(path, model__num_mtp_layers=1)
        changed(path, lambda found, copy=copy: found[copy].div_(2))


def test_dense_blocks_of_kimi_linear_are_read_under_the_name_that_the_library_saves(folder: Folder) -> None:
    def one_dense(found: dict[str, Tensor]) -> None:
        at = "model.layers.0.block_sparse_moe."
        for name in [name for name in found if name.startswith(at)]:
            del found[name]
        for name, shape in (("gate", (48, 32)), ("up", (48, 32)), ("down", (32, 48))):
            found[f"{at}{name}_proj.weight"] = torch.randn(shape)

    def published(found: dict[str, Tensor]) -> None:
        for name in [name for name in found if name.startswith("model.layers.0.block_sparse_moe.")]:
            found[name.replace("block_sparse_moe", "mlp")] = found.pop(name)

    path = changed(folder("kimi-linear"), one_dense)
    edited(path, mlp_layer_types=["dense", "sparse", "sparse"])
    saved = loaded(path)[1].parameters()
    own = loaded(changed(path, published))[1].parameters()
    assert all(torch.equal(own[name], one) for name, one in saved.items())


def prediction_block_beside(found: dict[str, Tensor]) -> None:
    """A copy of the block with attention times 2, as Qwen3-Next names it."""
    at = "model.layers.3."
    found |= {name.replace(at, "mtp.layers.0."): one * 2 for name, one in found.items() if name.startswith(at)}
    for name, shape in (("pre_fc_norm_embedding", (32,)), ("pre_fc_norm_hidden", (32,)), ("norm", (32,))):
        found[f"mtp.{name}.weight"] = torch.randn(shape)
    found["mtp.fc.weight"] = torch.randn(32, 64)


def test_the_block_for_multi_token_prediction_of_qwen3_next_is_read_if_the_model_has_one(folder: Folder) -> None:
    path = changed(folder("qwen3-next"), prediction_block_beside)
    assert not [name for name in loaded(path)[1].parameters() if name.startswith("ahead.")]
    own, stored = loaded(path, model__num_mtp_layers=1)[1].parameters(), tensors(path)
    for ours, theirs in (("merge", "fc"), ("token_norm", "pre_fc_norm_embedding"), ("norm", "norm")):
        assert torch.equal(own[f"ahead.depths.0.{ours}.weight"], stored[f"mtp.{theirs}.weight"][1])
    for name in ("attn.qkv.weight", "moe.experts.up", "moe.shared_gate.weight", "norm2.weight"):
        assert torch.equal(own[f"ahead.depths.0.block.{name}"], 2 * own[f"blocks.3.{name}"])
    with pytest.raises(UsageError, match="has no published form"):
        loaded(path, model__num_mtp_layers=2)


PARTS = {"0": "2", "1": "1"}
"""Part of a depth -> a block of the same kind: attention and experts."""


def prediction_parts(found: dict[str, Tensor]) -> None:
    """Copies of blocks times 2, as Nemotron 3 names them."""
    for part, block in PARTS.items():
        at = f"backbone.layers.{block}."
        copies = {name.removeprefix(at): one * 2 for name, one in found.items() if name.startswith(at)}
        found |= {f"mtp.layers.{part}.{name}": one for name, one in copies.items()}
    for name in ("0.enorm", "0.hnorm", "1.final_layernorm"):
        found[f"mtp.layers.{name}.weight"] = torch.randn(32)
    found["mtp.layers.0.eh_proj.weight"] = torch.randn(32, 64)


def test_the_parts_for_multi_token_prediction_of_nemotron_are_read_if_the_model_has_some(folder: Folder) -> None:
    path = changed(folder("nemotron"), prediction_parts)
    edited(path, num_nextn_predict_layers=1, mtp_layers_block_type=["attention", "moe"])
    assert not [name for name in loaded(path)[1].parameters() if name.startswith("ahead.")]
    model, stored = loaded(path, model__num_mtp_layers=1)[1], tensors(path)
    own = {**model.parameters(), **model.states()}
    for ours, theirs in (("merge", "0.eh_proj"), ("token_norm", "0.enorm"), ("norm", "1.final_layernorm")):
        assert torch.equal(own[f"ahead.depths.0.{ours}.weight"], stored[f"mtp.layers.{theirs}.weight"][1])
    for part, block in PARTS.items():
        at = f"ahead.depths.0.block.branches.{part}."
        copies = {name.removeprefix(at): one for name, one in own.items() if name.startswith(at)}
        assert len(copies) > 2
        assert [n for n, one in copies.items() if not torch.equal(one, 2 * own[f"blocks.{block}.{n}"])] == []
    with pytest.raises(UsageError, match=r"it lacks 'mtp\.layers\.2\.e"):
        loaded(path, model__num_mtp_layers=2)


# What of a folder is not read.


def test_saved_frequencies_of_older_releases_are_not_read(folder: Folder, models: Made) -> None:
    """The library computes them from config.json, whatever the folder has."""
    path = folder("llama")
    put("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8))(path)
    assert (logits(loaded(path)[1], TOKENS) - models["llama"][1](TOKENS).logits).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_types_of_the_tensors_decide_and_not_the_field_of_config_json(dtype: str, folder: Folder) -> None:
    """`torch_dtype` and `dtype` say in which type the library would compute."""
    path = folder("llama")
    before = {name: one.clone() for name, one in loaded(path)[1].parameters().items()}
    edited(path, torch_dtype=dtype, dtype=dtype)
    after = loaded(path)[1].parameters()
    assert all(torch.equal(after[name], one) for name, one in before.items())
