"""Published checkpoints: what the transformers library computes and writes is what mplug computes and writes."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Cli
from safetensors.torch import save_file
from torch import Tensor

transformers = pytest.importorskip("transformers")

from hybrid_models import HYBRIDS  # noqa: E402
from library_models import TABLES  # noqa: E402
from mplug_huggingface_format.decoders import weight_decoder  # noqa: E402
from mplug_huggingface_format.folder import open_public  # noqa: E402
from published import FAMILIES, VOCAB, Made, Reads, at, loaded, logits, rewritten, run_of, save, tensors  # noqa: E402
from published_cases import quick  # noqa: E402
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

from mplug.errors import UsageError  # noqa: E402
from mplug.gradients.region import region  # noqa: E402
from mplug.model.model import Model  # noqa: E402
from mplug.training.loop import train  # noqa: E402

TOKENS = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(3))
ONE_STEP = {
    "trainer.steps": 1,
    "trainer.global_batch_size": 2,
    "trainer.eval_every": 0,
    "optimizer.lr": 1e-30,
    "optimizer.weight_decay": 0.0,
}
"""With this learning rate, the weights of a checkpoint are those that the run began with."""


def is_hybrid(case: Any) -> bool:
    """Whether a case of `quick` is a family whose blocks have scans."""
    (family,) = getattr(case, "values", (case,))
    return TABLES["published"]["families"][family]["model_type"] in HYBRIDS


def require_equal(found: Path, expected: Path) -> None:
    one, other = tensors(found), tensors(expected)
    assert one.keys() == other.keys()
    for name, (file, tensor) in other.items():
        assert one[name][0] == file
        assert one[name][1].dtype == tensor.dtype
        assert torch.equal(one[name][1], tensor), name


@pytest.mark.wide("families", quick=["qwen3.5-moe", "kimi-linear", "deepseek-v2", "granite-4", "gpt-oss", "gpt2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_library(family: str, models: Made) -> None:
    folder, theirs = models[family]
    _, ours = loaded(folder)
    with torch.no_grad():
        expected = theirs(TOKENS).logits
    assert expected.abs().max() > 0.5
    assert (logits(ours, TOKENS) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("family", [one for one in quick("qwen3-next") if is_hybrid(one)])
def test_greedy_tokens_are_those_that_the_library_generates_with_its_states(family: str, models: Made) -> None:
    folder, theirs = models[family]
    _, ours = loaded(folder)
    given = TOKENS[:, :9]
    expected = theirs.generate(given, max_new_tokens=7, do_sample=False, eos_token_id=None, pad_token_id=0)
    for _ in range(7):
        given = torch.cat((given, logits(ours, given)[:, -1:].argmax(dim=-1)), dim=1)
    assert torch.equal(given, expected)


@pytest.mark.wide("families", quick=["gpt-oss"])
@pytest.mark.parametrize("family", quick("gpt2", "gpt-oss"))
def test_the_export_of_an_import_is_equal_bit_by_bit(family: str, tmp_path: Path, cli_here: Cli) -> None:
    source = tmp_path / "source"
    save(FAMILIES[family](), source, 2, torch.bfloat16)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    run = run_of(source, ONE_STEP)
    run.directory = tmp_path / "runs" / "imported"
    train(run)
    shutil.copytree(source, tmp_path / "original")
    shutil.rmtree(source)  # the run has kept what it needs
    result = cli_here("checkpoint", "export", "--to", "huggingface", "exported")
    assert result.returncode == 0, result.stderr
    require_equal(tmp_path / "exported", tmp_path / "original")
    found = re.search(r'in transformers: transformers\.(\w+)\.from_pretrained\("exported"\)', result.stdout)
    assert found
    assert hasattr(transformers, found[1])
    for name in ("config.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "exported" / name).read_bytes() == (tmp_path / "original" / name).read_bytes()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    _, ours = loaded(tmp_path / "exported")
    with torch.no_grad():
        expected = again(TOKENS).logits
    assert (expected - logits(ours, TOKENS)).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("family", quick("mixtral"))
def test_a_run_from_scratch_is_exported_with_a_config_of_its_own(
    family: str, models: Made, tmp_path: Path, cli_here: Cli
) -> None:
    """The config is written by the family, not kept: the settings alone describe the model."""
    folder, theirs = models[family]
    run = run_of(folder, ONE_STEP)
    run.directory = tmp_path / "runs" / "scratch"
    train(run)
    shutil.rmtree(run.directory / "published")
    result = cli_here("checkpoint", "export", "--to", "huggingface", "exported", "--shard-size", "1e-4")
    assert result.returncode == 0, result.stderr
    assert len(list((tmp_path / "exported").glob("*.safetensors"))) > 1
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, theirs(TOKENS).logits)


def require_own_boxes(model: Model, whole: dict[str, Tensor], rank: int) -> int:
    """Fail unless a rank's boxes have the values of the whole tensors; returns their bytes in fp32."""
    own = 0
    for name, parameter in model.parameters().items():
        for box in model.placements[name].boxes(rank):
            assert torch.equal(region(parameter.data, box), at(whole[name], box)), (rank, name)
            own += 4 * box.numel
    return own


@pytest.mark.parametrize("family", quick("gpt2", "gpt-oss"))
def test_each_rank_reads_its_own_boxes_and_at_most_one_tensor_more(
    family: str, models: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three files under tp2pp2. The test counts the bytes that a rank reads: its memory depends on the system."""
    folder, _ = models[family]
    whole = {name: parameter.data for name, parameter in loaded(folder)[1].parameters().items()}
    sizes = [tensor.nbytes for _, tensor in tensors(folder).values()]
    for rank in range(4):
        with monkeypatch.context() as patch:
            reads = Reads(patch)
            _, model = loaded(folder, "tp2pp2", rank)
        own = require_own_boxes(model, whole, rank)
        assert own < sum(sizes) / 2
        assert reads.total <= own + max(sizes)
        assert reads.largest <= max(sizes)


@pytest.mark.wide("families")
def test_what_is_divided_in_other_ways_is_read_too(models: Made) -> None:
    """Experts, and rows at rest, whose boxes cut through heads and segments."""
    folder, _ = models["mixtral"]
    whole = {name: parameter.data for name, parameter in loaded(folder)[1].parameters().items()}
    for layout in ("tp2ep2", "fsdp2ep2", "fsdp2tp2"):
        for rank in range(4 if "tp" in layout else 2):
            require_own_boxes(loaded(folder, layout, rank)[1], whole, rank)


# Quantised weights.


def quantise(source: Path, target: Path, block: int) -> Path:
    """Quantise the matrices of a folder block by block; returns the folder of the dequantised twin."""
    stored, plain = {}, {}
    for name, (_, tensor) in tensors(source).items():
        if tensor.dim() != 2 or "gate.weight" in name or "embed" in name or "lm_head" in name:
            stored[name] = plain[name] = tensor
            continue
        rows, columns = (-(-size // block) for size in tensor.shape)
        factors, codes, exact = torch.zeros(rows, columns), torch.zeros(tensor.shape), torch.zeros(tensor.shape)
        for i in range(rows):
            for j in range(columns):
                at = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
                factors[i, j] = tensor[at].abs().max() / 448
                codes[at] = (tensor[at] / factors[i, j]).to(torch.float8_e4m3fn).float()
                exact[at] = codes[at] * factors[i, j]
        stored[name], plain[name] = codes.to(torch.float8_e4m3fn), exact
        stored[f"{name}_scale_inv"] = factors
    method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}
    return with_twin(source, target, stored, plain, method)


def with_twin(
    source: Path, target: Path, stored: dict[str, Tensor], plain: dict[str, Tensor], method: dict[str, Any]
) -> Path:
    """Save quantised weights in `target`, and the values for which they stand in its twin; returns the twin."""
    config, twin = json.loads((source / "config.json").read_text()), target.with_name("twin")
    for folder, weights, quantisation in ((target, stored, method), (twin, plain, None)):
        folder.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
    return twin


def require_twins(folder: Path, twin: Path, layouts: dict[str, int]) -> None:
    """Fail unless every rank reads the same values from both."""
    for layout, ranks in layouts.items():
        for rank in range(ranks):
            found, expected = (loaded(one, layout, rank)[1].parameters() for one in (folder, twin))
            assert found.keys() == expected.keys()
            assert [name for name, one in expected.items() if not torch.equal(found[name], one)] == []


def test_a_quantised_folder_equals_its_dequantised_twin(models: Made, tmp_path: Path) -> None:
    """Blocks of 12, which no rank's box is a multiple of."""
    twin = quantise(models["mixtral"][0], tmp_path / "quantised", 12)
    assert open_public(tmp_path / "quantised").quantisation is not None
    require_twins(tmp_path / "quantised", twin, {"": 1, "tp2pp2": 4})
    exact = dict(loaded(models["mixtral"][0])[1].parameters().items())
    for name, one in loaded(twin)[1].parameters().items():
        assert torch.equal(one, exact[name]) == (
            name.endswith(("norm1.weight", "norm2.weight", "router.weight")) or (not name.startswith("blocks"))
        )
        assert (one - exact[name]).abs().max() < 0.07


def slices(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))


def test_mxfp4_is_decoded_as_the_library_decodes_it() -> None:
    """Any box, also one that begins inside a group of 32 values."""
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 10, 4), generator=generator, dtype=torch.uint8)
    whole = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [E, in, out]
    decoder, stored = weight_decoder({"quant_method": "mxfp4"}), {"up_blocks": blocks, "up_scales": scales}
    assert decoder.stored("up", (3, 128, 10), stored) == {"up_blocks": (3, 10, 4, 16), "up_scales": (3, 10, 4)}
    assert decoder.stored("down", (3, 128, 10), stored) == {}
    for start, shape in (((0, 0, 0), (3, 128, 10)), ((1, 37, 2), (1, 60, 5)), ((2, 127, 9), (1, 1, 1))):
        boxes = decoder.boxes("up", start, shape)
        parts = {name: stored[name][slices(*box)] for name, box in boxes.items()}
        assert torch.equal(decoder.decode("up", start, shape, parts), whole[slices(start, shape)])
    assert boxes["up_blocks"] == ((2, 9, 3, 0), (1, 1, 1, 16)), "one group of 32 values"


def pack_experts(source: Path, target: Path) -> Path:
    """Replace the experts of a gpt-oss by random MXFP4 weights; returns the folder of the dequantised twin."""
    generator = torch.Generator().manual_seed(2)
    stored, plain = {}, {}
    for name, (_, tensor) in tensors(source).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = plain[name] = tensor
            continue
        experts, inside, outside = tensor.shape
        groups = (experts, outside, inside // 32)
        blocks = torch.randint(0, 256, (*groups, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, groups, generator=generator, dtype=torch.uint8)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    return with_twin(source, target, stored, plain, {"quant_method": "mxfp4"})


@pytest.mark.wide("families")
def test_packed_experts_equal_their_dequantised_twin(tmp_path: Path) -> None:
    save(FAMILIES["gpt-oss"](intermediate_size=64, num_hidden_layers=2), tmp_path / "source")
    twin = pack_experts(tmp_path / "source", tmp_path / "packed")
    require_twins(tmp_path / "packed", twin, {"": 1, "tp2ep2": 2})
    library = transformers.AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32)
    with torch.no_grad():
        expected = library(TOKENS).logits
    assert (logits(loaded(tmp_path / "packed")[1], TOKENS) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_settings_that_contradict_the_config_are_listed_in_one_error(models: Made, cli_here: Cli) -> None:
    words = ("config", "show", "--pretrained", str(models["mixtral"][0]), "--set", "model.init_std=0.5")
    refused = cli_here(*words, "--set", "model.num_layers=3", "--set", "model.qk_norm=true").stderr
    assert "model.num_layers (--set): 3, but the weights need 4" in refused
    assert "model.qk_norm (--set): True, but the weights need False" in refused
    assert "init_std" not in refused
    assert "init_std: 0.5" in cli_here(*words).stdout


def test_a_family_that_does_not_read_the_architecture_is_refused(models: Made, cli_here: Cli) -> None:
    words = ("config", "show", "--pretrained", str(models["gpt2"][0]), "--set", "trainer.seq_length=32", "--model")
    result = cli_here(*words, "mixtral")
    assert result.returncode == 2
    assert "'GPT2LMHeadModel', which models/mixtral does not read (it reads MixtralForCausalLM" in result.stderr
    assert cli_here(*words, "gpt").returncode == 0


# A part of the weights.


def test_patterns_choose_what_is_loaded(models: Made, tmp_path: Path) -> None:
    folder, _ = models["mixtral"]
    whole = loaded(folder)[1].parameters()
    part = {"checkpoint__pretrained__only": ["blocks", "head"], "checkpoint__pretrained__except": ["blocks.*.moe"]}
    kept = {name for name, one in loaded(folder, **part)[1].parameters().items() if torch.equal(one, whole[name])}
    assert kept == {name for name in whole if name.startswith(("blocks.", "head.")) and ".moe." not in name}
    shutil.copytree(folder, tmp_path / "more")
    rewritten(tmp_path / "more", lambda t: (t.update({"vision.a": torch.ones(2)}), t.pop("lm_head.weight")))
    with pytest.raises(UsageError, match=r"it lacks 'lm_head.weight'; the model does not use 'vision.a'"):
        loaded(tmp_path / "more")
    loaded(tmp_path / "more", checkpoint__pretrained__except=["vision", "head.project"])


def test_a_folder_without_the_prefix_is_read_and_exported_without_it(models: Made, tmp_path: Path) -> None:
    folder, _ = models["gpt2"]
    shutil.copytree(folder, tmp_path / "base")

    def strip(found: dict[str, Tensor]) -> None:
        for name in [*found]:
            found[name.removeprefix("transformer.")] = found.pop(name)
        found["h.0.attn.bias"] = torch.ones(2)  # a mask that older releases saved

    rewritten(tmp_path / "base", strip)
    (_, found), (_, expected) = loaded(tmp_path / "base"), loaded(folder)
    assert torch.equal(logits(found, TOKENS), logits(expected, TOKENS))
