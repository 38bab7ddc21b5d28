"""Checkpoints of DeepSpeed's own engine become runs of mplug: the same weights and moments, bit by bit."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Evil
from deepspeed_engine import BETAS, DECAY, EPS, LLAMA, LR, Llama, States, saved_in_turn
from mplug_deepspeed_format.checkpoint import DeepSpeedCheckpoint
from published import logits
from safetensors.torch import load_file
from torch import Tensor

from mplug import UsageError
from mplug.cli import main
from mplug.model.build import build_model
from mplug.run.prepare import prepare
from mplug_pretrained.external_form import conversion
from mplug_pretrained.inference import load_for_inference
from mplug_pretrained.transfer import fill_theirs
from mplug_saving.folder import read_valid
from mplug_testing import run_workers, runs
from mplug_testing.harness import tiny_config

pytestmark = pytest.mark.skipif(
    find_spec("mplug_deepspeed") is None or find_spec("deepspeed") is None, reason="it is not installed"
)

ADAMW = {"optimizer.lr": LR, "optimizer.beta2": BETAS[1], "optimizer.eps": EPS, "optimizer.weight_decay": DECAY}
RUN: dict[str, Any] = {
    **ADAMW,
    "trainer.precision": "fp32",
    "trainer.max_grad_norm": 1.0,
    "trainer.global_batch_size": 4,
    "trainer.steps": 3,
    "trainer.eval_every": 0,
    "schedule.warmup_steps": 0,
}
OURS = {**RUN, "model.num_layers": 2, "model.vocab_size": 263}
OF_LLAMA = {
    **RUN,
    "model.name": "llama",
    "data.vocab_size": LLAMA["vocab_size"],
    "model.num_kv_heads": LLAMA["num_key_value_heads"],
    "model.num_layers": LLAMA["num_hidden_layers"],
    "model.ffn_hidden_size": LLAMA["intermediate_size"],
    "model.norm_eps": LLAMA["rms_norm_eps"],
    **{f"model.{name}": LLAMA[name] for name in ("hidden_size", "num_attention_heads", "vocab_size", "rope_theta")},
    "model.qk_norm": False,
}
EVERYWHERE = {"stage3_param_persistence_threshold": 10**9}
"""Modules of ours read weights of the modules inside of them, which stage 3 does not gather for that."""


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **(EVERYWHERE if stage == 3 else {})}, **more}


def imported(folder: Path, settings: dict[str, Any], name: str = "imported", status: int = 0) -> Path:
    """Import a checkpoint by the command; returns the folder of the run's checkpoints."""
    tiny = Path(runs.__file__).with_name("tiny.yaml")
    words = [word for field, value in settings.items() for word in ("--set", f"{field}={value}")]
    import_it = ["checkpoint", "import", "--from", "deepspeed", str(folder), "--name", name, "--config", str(tiny)]
    with pytest.raises(SystemExit) as ended:
        main([*import_it, *words])
    assert int(ended.value.code or 0) == status
    return Path("runs", name, "checkpoints")


def box(whole: Tensor, start: Any, shape: Any) -> Tensor:
    return whole[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]


def tensors_of(path: Path) -> dict[str, Tensor]:
    read_valid(path)
    return {name.rpartition("@")[0]: one for name, one in load_file(path / "rank00000.safetensors").items()}


def require_equal(path: Path, settings: dict[str, Any], expected: States, moments: bool = True) -> None:
    """Fail unless a checkpoint has exactly these states, by our names or by those of the published form."""
    found, model = tensors_of(path), build_model(prepare(tiny_config(settings)))
    keys = ("weight", "exp_avg", "exp_avg_sq") if moments else ("weight",)
    public = {} if expected.keys() & model.placements.keys() else conversion(model).public
    ours = {name for name, one in model.placements.items() if one.parameter.trainable}
    trained = {name for name, targets in public.items() if targets[0].link.ours.tensor in ours}
    assert (trained or ours) == set(expected)
    for name, states in expected.items():
        for key in keys:

            def read(ours: str, start: Any, shape: Any, key: str = key) -> Tensor:
                return box(found[f"{ours}/{key}"], start, shape)

            values = torch.full_like(states[key], float("nan"))
            if public:
                fill_theirs(public[name], values, read)
            assert torch.equal(values if public else found[f"{name}/{key}"], states[key]), (name, key)
    if moments:
        assert {float(one) for name, one in found.items() if name.endswith("/step")} == {2.0}
    else:
        assert all(name.endswith("/weight") for name in found)


def require_same_third_step(path: Path, settings: dict[str, Any], third: States, folder: Path) -> None:
    witness = runs.trained(tiny_config(settings), folder, resume_from=path)
    assert list(witness.figures) == [3]
    for name, states in third.items():
        assert (witness.weights[name] - states["weight"]).abs().max() < 1e-5, name


@pytest.fixture(scope="module")
def stage_3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[States, States]]:
    """A checkpoint of stage 3 on two ranks, of a model of ours, and DeepSpeed's states then and one step later."""
    folder = tmp_path_factory.mktemp("stage3")
    return folder, run_workers(2, saved_in_turn, [(folder, "ours", OURS, zero(3))])[0][0]


@pytest.mark.wide("reshard")
def test_an_imported_run_has_the_states_of_stage_3_and_continues_as_deepspeed_does(
    stage_3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, (second, third) = stage_3
    monkeypatch.chdir(tmp_path)
    path = imported(folder, OURS) / "step_00000002"
    assert "the optimizer's states after step 2" in capfd.readouterr().out
    require_equal(path, OURS, second)
    require_same_third_step(path, OURS, third, tmp_path / "continued")
    assert any((second[name]["weight"] - third[name]["weight"]).abs().max() > 1e-3 for name in third)


Damage = Callable[[Path], object]
OPTIM, MODEL = "zero_pp_rank_{}_mp_rank_00_optim_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"


def absent(pattern: str) -> Damage:
    return lambda tag: [file.unlink() for file in tag.glob(pattern)]


def short_partition(tag: Path) -> None:
    found = torch.load(tag / OPTIM.format(1), weights_only=False)
    groups = found["optimizer_state_dict"]["fp32_flat_groups"]
    groups[0] = groups[0][:-1].clone()
    torch.save(found, tag / OPTIM.format(1))


def of_another_save(tag: Path) -> None:
    shutil.copy(tag / OPTIM.format(1), tag / OPTIM.format(2))


def content(value: Callable[[Path], Any]) -> Damage:
    return lambda tag: torch.save(value(tag), tag / OPTIM.format(0))


def no_files(tag: Path) -> None:
    shutil.rmtree(tag.parent)
    tag.parent.mkdir()


absent_rank = absent(OPTIM.format(1))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (absent_rank, f"lacks '{OPTIM.format(1)}': 2 data-parallel ranks have saved it"),
        (absent(MODEL.format(1)), f"lacks '{MODEL.format(1)}': 2 data-parallel ranks"),
        (absent("*_optim_states.pt"), "lacks the files '..._optim_states.pt', which have the fp32 weights"),
        (of_another_save, f"has '{OPTIM.format(2)}', but 2 data-parallel ranks have saved"),
        (lambda tag: os.truncate(tag / OPTIM.format(0), 3000), f"{OPTIM.format(0)}'.*copy the checkpoint again"),
        (
            content(lambda tag: {"a": Evil(tag / "owned")}),
            "contains objects of .*pathlib.Path.*, and reading them would",
        ),
        (short_partition, r"group 0 has \[\d+, \d+\] elements on its ranks, and its parameters need"),
        (content(lambda _: [1, 2]), "is no checkpoint of DeepSpeed that mplug can read"),
        (lambda tag: tag.rename(tag.with_name("global_step3")), "names 'global_step2', and there is no such folder"),
        (no_files, "it has no file '..._model_states.pt'; name the folder that save_checkpoint has written"),
        (
            lambda tag: (tag / "layer_00-model_00-model_states.pt").touch(),
            "a file of pipeline stages, which mplug cannot join; convert the checkpoint to a universal",
        ),
    ],
)
def test_damaged_and_foreign_folders_are_refused_in_one_sentence(
    stage_3: Any, damage: Damage, sentence: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(stage_3[0], tmp_path / "copy")
    damage(folder / "global_step2")
    with pytest.raises(UsageError, match=sentence) as refused:
        DeepSpeedCheckpoint(folder)
    assert "\n" not in str(refused.value)
    assert not (folder / "global_step2" / "owned").exists()


def test_steps_that_an_optimizer_counts_in_its_groups_are_read(stage_3: Any, tmp_path: Path) -> None:
    """DeepSpeed's fused Adam keeps them there, as an integer."""
    folder = shutil.copytree(stage_3[0], tmp_path / "copy")
    for file in (folder / "global_step2").glob("*_optim_states.pt"):
        found = torch.load(file, weights_only=False)
        base = found["optimizer_state_dict"]["optimizer_state_dict"]
        for state, group in zip(base["state"].values(), base["param_groups"], strict=True):
            group["step"] = int(state.pop("step"))
        torch.save(found, file)
    states = [one.states for one in DeepSpeedCheckpoint(folder).tensors.values()]
    assert states == [{"exp_avg": None, "exp_avg_sq": None, "step": 2.0}] * len(states)
    assert states


def test_a_refused_import_ends_with_status_2_and_leaves_nothing(
    stage_3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(stage_3[0], tmp_path / "copy")
    absent_rank(folder / "global_step2")
    imported(folder, OURS, status=2)
    assert "lacks 'zero_pp_rank_1" in capfd.readouterr().err
    imported(stage_3[0], {**OURS, "model.num_layers": 3}, status=2)
    assert "it has no counterpart of 'blocks.2.attn.k_norm'" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


FROZEN = {"model.frozen": ["blocks.1.mlp.down"]}
TIED = {"model.tie_embeddings": True}
HALF = {"bf16": {"enabled": True}}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ours in stage 1": ("ours", OURS, zero(1)),
    "ours in stage 2, tied": ("ours", {**OURS, **TIED}, zero(2)),
    "stage 1": ("llama", {}, zero(1)),
    "stage 1, frozen": ("llama", FROZEN, zero(1)),
    "stage 2, tied": ("llama", TIED, zero(2)),
    "stage 2, frozen": ("llama", FROZEN, zero(2)),
    "stage 3": ("llama", {}, zero(3)),
    "stage 3, frozen": ("llama", FROZEN, zero(3)),
    "stage 3, tied, in sub-groups": ("llama", TIED, {"zero_optimization": {"stage": 3, "sub_group_size": 2000}}),
    "bf16, stage 1": ("llama", {}, zero(1, **HALF)),
    "bf16, stage 3": ("llama", {}, zero(3, **HALF)),
    "bf16, gradients in fp32": ("llama", {}, zero(1, **HALF, data_types={"grad_accum_dtype": "fp32"})),
    "fp16, stage 2": ("llama", {}, zero(2, fp16={"enabled": True, "initial_scale_power": 8})),
    "elastic": ("llama", {}, {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}}),
    "fp32 without ZeRO": ("llama", {}, zero(0)),
}


def settings_of(label: str) -> dict[str, Any]:
    kind, changes, _ = CASES[label]
    return changes if kind == "ours" else {**OF_LLAMA, **changes}


def of_library(label: str) -> dict[str, Any]:
    """How `Llama.of` makes the model of a case."""
    changes = CASES[label][1]
    frozen = "layers.1.mlp.down_proj" if "model.frozen" in changes else ""
    return {"frozen": frozen, "tie_word_embeddings": "model.tie_embeddings" in changes}


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, States, States]]:
    folders = {label: tmp_path_factory.mktemp("saved") for label in CASES}
    cases = [
        (folders[label], kind, changes if kind == "ours" else of_library(label), config)
        for label, (kind, changes, config) in CASES.items()
    ]
    found = run_workers(2, saved_in_turn, cases)[0]
    return {label: (folders[label], *states) for label, states in zip(CASES, found, strict=True)}


@pytest.mark.wide("layouts")
@pytest.mark.parametrize("label", CASES)
def test_every_kind_of_checkpoint_has_the_masters_and_moments_of_the_engine(
    every: Any, label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    folder, second, third = every[label]
    settings, has_states = settings_of(label), CASES[label][2].get("zero_optimization", {}).get("stage") != 0
    path = imported(folder, settings) / ("step_00000002" if has_states else "step_00000000")
    require_equal(path, settings, second, moments=has_states)
    if CASES[label][0] == "ours":
        require_same_third_step(path, settings, third, tmp_path / "continued")
        return
    library = Llama.of(**of_library(label))
    missing, unexpected = library.load_state_dict({n: s["weight"] for n, s in second.items()}, strict=False)
    assert not unexpected
    frozen = {name for name, one in library.named_parameters() if not one.requires_grad}
    assert set(missing) <= {*frozen, "lm_head.weight"}
    tokens = torch.randint(0, LLAMA["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(5))
    model = load_for_inference(prepare(tiny_config(settings)), path)
    with torch.no_grad():
        expected = library.eval()(tokens).logits
    assert (logits(model, tokens) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.wide("layouts")
@pytest.mark.parametrize("label", ["ours in stage 1", "stage 3, frozen", "bf16, gradients in fp32", "stage 2, tied"])
def test_a_universal_checkpoint_has_the_same_states(
    every: Any, label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, second, _ = every[label]
    saved, made = folder / "global_step2", tmp_path / "converted" / "universal"
    words = ["--input_folder", str(saved), "--output_folder", str(made), "--inject_missing_state"]
    converter = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words]
    alone = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    subprocess.run([*converter, *alone], check=True, capture_output=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    assert not list(made.glob("*_optim_states.pt"))
    settings = settings_of(label)
    for number, named in enumerate((made, made.parent)):
        path = imported(named, settings, f"universal{number}") / "step_00000002"
        require_equal(path, settings, second)
    first = next(folder for folder in sorted((made / "zero").iterdir()) if folder.is_dir())
    (first / "fp32.pt").unlink()
    imported(made, settings, "damaged", status=2)


@pytest.mark.wide("layouts")
def test_the_parts_of_two_tensor_parallel_ranks_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """DeepSpeed's automatic tensor parallelism of a Llama. The head has an even number of rows, so it is cut too."""
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("transformers")
    library = {"frozen": "", "vocab_size": 68, "same_data": True}
    config = zero(1, tensor_parallel={"autotp_size": 2})
    parts = [
        states for ((states, _),) in run_workers(2, saved_in_turn, [(tmp_path / "saved", "llama", library, config)])
    ]
    whole = {name: tuple(one.shape) for name, one in Llama.of("", vocab_size=68).named_parameters()}
    expected: States = {}
    for name, shape in whole.items():
        own = [part[name] for part in parts]
        dims = [dim for dim, size in enumerate(shape) if own[0]["weight"].shape[dim] != size]
        expected[name] = {key: torch.cat([one[key] for one in own], dims[0]) if dims else own[0][key] for key in own[0]}
    assert sum(parts[0][name]["weight"].numel() for name in whole) < sum(
        one["weight"].numel() for one in expected.values()
    )
    settings = {**OF_LLAMA, "model.vocab_size": 68, "data.vocab_size": 68}
    require_equal(imported(tmp_path / "saved", settings) / "step_00000002", settings, expected)
    for file in (tmp_path / "saved" / "global_step2").glob("*mp_rank_01*"):
        file.unlink()
    imported(tmp_path / "saved", settings, "absent", status=2)
    assert "lacks the files 'mp_rank_01': 2 tensor-parallel ranks have saved it" in capfd.readouterr().err
