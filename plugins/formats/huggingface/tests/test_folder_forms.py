"""Forms of a published folder that could be read wrongly: tied heads, types and quantised tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Cli
from torch import Tensor

pytest.importorskip("transformers")

from changed_folders import EMBEDDING, HEAD, O_PROJ, TOKENS, Change, Folder, changed, drop, index, of_library, refusal
from mplug_huggingface_format.folder import WHOLE
from published import VOCAB, Made, edited, loaded, logits, require_fitting, tensors

from mplug.errors import UsageError
from mplug_pretrained import copies


def copies_in_other_forms(path: Path) -> None:
    for name in ("consolidated.safetensors", "model.fp16.safetensors", "pytorch_model.bin"):
        (path / name).write_bytes(b"not a model")


def index_of_one_file(path: Path) -> None:
    index(dict.fromkeys(tensors(changed(path)), WHOLE))(path)


def without_head_but_tied(path: Path) -> None:
    drop(HEAD)(path)
    edited(path, tie_word_embeddings=True)


@pytest.mark.parametrize(
    "change", [copies_in_other_forms, index_of_one_file, without_head_but_tied, of_library("pt"), of_library("mlx")]
)
def test_other_forms_of_the_same_model_are_accepted(change: Callable[[Path], object], folder: Folder) -> None:
    path = folder("llama")
    change(path)
    require_fitting(path)


# A head beside a tied embedding, with its values or with others.


def with_head(found: dict[str, Tensor], factor: float = 1.0) -> None:
    found[HEAD] = found[EMBEDDING] * factor


def of_other_types(found: dict[str, Tensor]) -> None:
    found[EMBEDDING] = found[EMBEDDING].bfloat16()
    found[HEAD] = found[EMBEDDING].double()


def test_a_head_that_equals_the_tied_embedding_changes_nothing(folder: Folder, models: Made) -> None:
    path = changed(folder("qwen2"), with_head)
    require_fitting(path)
    expected = models["qwen2"][1](TOKENS).logits
    assert (logits(loaded(path)[1], TOKENS) - expected).abs().max() < 1e-5
    loaded(changed(path, lambda found: with_head(found, 2.0)), checkpoint__pretrained__except=["lm_head"])
    loaded(changed(path, of_other_types))


@pytest.mark.wide("fuzz", quick=["place1"])
@pytest.mark.parametrize("place", [(0, 0), (VOCAB - 1, 31), (VOCAB // 2, 3)])
def test_a_head_that_differs_in_one_value_is_refused_with_both_names(
    place: tuple[int, int], folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is compared part by part: a real one has gigabytes."""
    monkeypatch.setattr(copies, "COMPARED", 700)

    def add(found: dict[str, Tensor]) -> None:
        with_head(found)
        found[HEAD][place] += 1e-6

    path = changed(folder("qwen2"), add)
    with pytest.raises(UsageError, match=f"'{HEAD}' and '{EMBEDDING}' have different values"):
        loaded(path)
    found = {rank for rank in range(4) if not _reads(path, "tp2pp2", rank)}
    assert found in ({0, 2}, {1, 3}), "the ranks of both stages that hold this row read it"


def _reads(path: Path, layout: str, rank: int) -> bool:
    try:
        loaded(path, layout, rank)
    except UsageError:
        return False
    return True


@pytest.mark.wide("fuzz")
def test_every_rank_of_a_run_refuses_it(folder: Folder, tmp_path: Path, cli: Cli) -> None:
    """Only one of the two ranks holds the row that differs."""
    changed(folder("qwen2"), lambda found: (with_head(found), found[HEAD][-1].add_(1)))
    (tmp_path / "text.txt").write_text("one and two\n" * 400)
    words = ("--set", "trainer.seq_length=32", "--set", "data.path=text.txt", "--set", "trainer.device=cpu")
    result = cli("train", "--pretrained", "folder", "--parallel", "tp2", "--name", "run", *words)
    assert result.returncode == 2, result.stdout + result.stderr
    assert f"'{HEAD}' and '{EMBEDDING}' have different values" in result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()


def test_a_head_is_compared_in_a_folder_without_the_prefix_too(folder: Folder) -> None:
    def strip(found: dict[str, Tensor]) -> None:
        for name in [*found]:
            found[name.removeprefix("model.")] = found.pop(name)
        found[HEAD] = found["embed_tokens.weight"].clone()

    path = changed(folder("qwen2"), strip)
    loaded(path)
    changed(path, lambda found: found[HEAD].mul_(2))
    with pytest.raises(UsageError, match=f"'{HEAD}' and '{EMBEDDING}' have different values"):
        loaded(path)


# Quantised weights.


def quantised(found: dict[str, Tensor]) -> None:
    """Blocks of 8 of one matrix of each layer, with factors of 1: a form that is read."""
    for name in [name for name in found if name.endswith("o_proj.weight")]:
        found[name] = found[name].to(torch.float8_e4m3fn)
        found[f"{name}_scale_inv"] = torch.ones([-(-size // 8) for size in found[name].shape])


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [8, 8], "activation_scheme": "dynamic"}
SCALES = f"{O_PROJ}_scale_inv"


def cast(name: str, dtype: torch.dtype) -> Change:
    return lambda found: found.update({name: found[name].to(dtype)})


@pytest.mark.parametrize(
    ("change", "own", "sentence"),
    [
        (None, {}, ""),
        (None, {"modules_to_not_convert": ["lm_head"], "scale_fmt": "ue8m0"}, ""),
        (cast(O_PROJ, torch.bfloat16), {}, f"'{O_PROJ}' has the type BF16, but the quantised form"),
        (cast(SCALES, torch.uint8), {}, f"'{SCALES}' has the type U8"),
        (lambda t: t.pop(SCALES), {}, f"'{O_PROJ}' has the type F8_E4M3 without factors"),
        (cast(O_PROJ, torch.float8_e5m2), {}, f"'{O_PROJ}' has the type F8_E5M2"),
        (None, {"activation_scheme": "static"}, "an 'activation_scheme' other than 'dynamic'"),
        (None, {"weight_block_size": None}, "not in e4m3 with a 'weight_block_size' of two numbers"),
        (None, {"expert_dtype": "fp4"}, "the field 'expert_dtype' of its quantization_config is unknown"),
        (None, {"quant_method": None}, "it lacks the field 'quantization_config.quant_method'"),
    ],
)
def test_quantised_tensors_have_the_types_of_their_method(
    change: Change | None, own: dict[str, Any], sentence: str, folder: Folder
) -> None:
    path = changed(changed(folder("llama"), quantised), change or (lambda _: None))
    edited(path, quantization_config={**FP8, **own})
    if sentence:
        assert sentence in refusal(path)
    else:
        loaded(path)


def test_packed_experts_are_unsigned_bytes(folder: Folder) -> None:
    path, name = folder("gpt-oss"), "model.layers.0.mlp.experts.gate_up_proj"  # [4, 32, 96]
    edited(path, quantization_config={"quant_method": "mxfp4"})

    def pack(found: dict[str, Tensor], dtype: torch.dtype = torch.uint8) -> None:
        found.pop(name, None)
        found[f"{name}_blocks"] = torch.zeros(4, 96, 1, 16, dtype=dtype)
        found[f"{name}_scales"] = torch.zeros(4, 96, 1, dtype=torch.uint8)

    require_fitting(changed(path, pack))
    changed(path, lambda found: pack(found, torch.int8))
    assert f"'{name}_blocks' has the type I8, but the quantised form has uint8" in refusal(path)
    changed(path, lambda found: (pack(found), found.update({name: torch.zeros(4, 32, 96)})))
    assert f"the model does not use '{name}'" in refusal(path)
    edited(path, quantization_config={"quant_method": "mxfp4", "group_size": 16})
    assert "the field 'group_size' of its quantization_config is unknown for 'mxfp4'" in refusal(changed(path, pack))
