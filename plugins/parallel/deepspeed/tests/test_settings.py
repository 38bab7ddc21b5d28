"""A config file of DeepSpeed: what the run fills in, what reaches DeepSpeed unchanged, and what is refused at once."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mplug import UsageError
from mplug.model.build import build_model, measure_bytes
from mplug.run.prepare import prepare
from mplug_testing.harness import tiny_config

pytestmark = pytest.mark.skipif(
    find_spec("mplug_deepspeed") is None or find_spec("deepspeed") is None, reason="it is not installed"
)

BASE: dict[str, Any] = {"trainer.precision": "bf16", "parallel.layout": "deepspeed2", "model.num_layers": 2}


def run_of(settings: dict[str, Any]) -> Any:
    return prepare(tiny_config({**BASE, **settings}))


def effective(tmp_path: Path, file: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """The config that DeepSpeed receives for a file."""
    from mplug_deepspeed.config import DeepSpeedConfig
    from mplug_deepspeed.settings import Settings

    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(file))
    changes = {name.replace("__", "."): value for name, value in settings.items()}
    run = run_of({"parallel.deepspeed.config": str(path), **changes})
    build_model(run)
    return Settings.read(DeepSpeedConfig(config=str(path))).effective(run, 2)


HUGGING_FACE: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 12345,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
"""The file that Hugging Face's documents recommend for stage 3."""


def test_auto_is_filled_in_and_everything_else_reaches_deepspeed_unchanged(tmp_path: Path) -> None:
    found = effective(tmp_path, HUGGING_FACE)
    assert found["train_batch_size"] == 8
    assert found["train_micro_batch_size_per_gpu"] == 2
    assert found["gradient_accumulation_steps"] == 2
    assert found["bf16"] == {"enabled": True}
    assert found["fp16"] == {"enabled": False, "loss_scale": 0, "initial_scale_power": 16}
    assert found["steps_per_print"] == 2000
    zero = found["zero_optimization"]
    assert zero["stage3_max_live_parameters"] == 12345
    assert zero["stage3_gather_16bit_weights_on_model_save"] is True
    assert (zero["reduce_bucket_size"], zero["stage3_param_persistence_threshold"]) == (32 * 32, 320)
    assert "auto" not in json.dumps(found)
    assert "optimizer" not in found
    assert "scheduler" not in found


def test_all_contradictions_are_in_one_error_with_both_values(tmp_path: Path) -> None:
    file = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": False},
        "fp16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.9, 0.999]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}},
        "zero_optimization": {"stage": 2, "round_robin_gradients": True},
        "steps_per_print": 10,
    }
    with pytest.raises(UsageError) as refused:
        effective(tmp_path, file, parallel__deepspeed__stage=3)
    text = str(refused.value)
    for words in (
        "train_batch_size=16 in the file, and trainer.global_batch_size=8",
        "train_micro_batch_size_per_gpu=1 in the file, and 2",
        "gradient_accumulation_steps=8 in the file, and 2",
        "gradient_clipping=0.5 in the file, and trainer.max_grad_norm=1",
        "bf16.enabled=false in the file, and trainer.precision=bf16",
        "fp16.enabled=true in the file, and trainer.precision=bf16",
        "optimizer.params.lr=3e-05 in the file, and optimizer.lr=0.005",
        "optimizer.params.betas=[0.9, 0.999] in the file, and optimizer.betas=[0.9, 0.95]",
        "scheduler.params.warmup_num_steps=7 in the file, and schedule.warmup_steps=50",
        "zero_optimization.stage=2 in the file, and parallel.deepspeed.stage=3",
        "round_robin_gradients=true is not supported",
    ):
        assert words in text
    assert "steps_per_print" not in text
    assert text.splitlines()[-1] == '  set the run\'s settings to the values of the file, or write "auto" in the file'


def test_values_that_equal_those_of_the_run_are_no_contradiction(tmp_path: Path) -> None:
    file = {"train_batch_size": 8, "gradient_clipping": 1, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    assert effective(tmp_path, file)["zero_optimization"]["stage"] == 2


def of_nvme(stage: int = 3, **values: Any) -> dict[str, Any]:
    """A file that offloads states to files."""
    return {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "nvme", **values}}}


OFFLOAD = {"parallel.deepspeed.stage": 3, "parallel.deepspeed.offload_optimizer": True}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "pipeline": ({"parallel.layout": "pp2deepspeed2"}, "parallel/pp runs parts of the model in a schedule"),
    "fsdp": ({"parallel.layout": "fsdp2deepspeed2"}, "both shard the optimizer state"),
    "zero": (
        {"parallel.layout": "zero2deepspeed2"},
        "parallel/zero and parallel/deepspeed both shard the optimizer state",
    ),
    "a stage": ({"parallel.deepspeed.stage": 4}, "parallel.deepspeed.stage"),
    "fp64": ({"trainer.precision": "fp64"}, "computes in fp32, bf16 or fp16"),
    "matrices": ({"optimizer.name": "muon"}, "needs whole matrices"),
    "frozen": ({"parallel.deepspeed.stage": 3, "model.frozen": ["embedding"]}, "'embedding.token.weight' is frozen"),
    "weights": ({"parallel.deepspeed.offload_param": True}, "offload_param=true needs stage 3, and the stage is 1"),
    "a graph": ({"trainer.graphs": True, "trainer.device": "cpu"}, "trainer.graphs"),
    "experts": (
        {"parallel.layout": "ep2deepspeed2", "model.name": "mixtral", "model.num_experts": 4},
        "is summed over others",
    ),
    "no file": ({"parallel.deepspeed.config": "nowhere.json"}, "'nowhere.json' cannot be read: No such file"),
    "a list": ({"file": "[]"}, "must be a JSON object"),
    "no JSON": ({"file": "{,"}, "is not valid JSON"),
    "twice": ({"file": '{"bf16": {}, "bf16": {}}'}, "the key 'bf16' appears twice"),
    "stage 0": ({"file": '{"zero_optimization": {"stage": 0}}'}, "zero_optimization.stage=0 is not supported"),
    "NVMe": ({"file": json.dumps(of_nvme())}, 'offload_optimizer.device="nvme" needs a folder: nvme_path'),
    "NVMe in stage 2": ({"file": json.dumps(of_nvme(2, nvme_path="."))}, "needs stage 3, and the stage is 2"),
    "no folder": ({**OFFLOAD, "parallel.deepspeed.nvme_path": "nowhere"}, "'nowhere': this is no folder in which"),
    "two folders": (
        {**OFFLOAD, "parallel.deepspeed.nvme_path": "..", "file": json.dumps(of_nvme(nvme_path="."))},
        'nvme_path="." in the file, and parallel.deepspeed.nvme_path=.. in the run',
    ),
    "nothing to offload": ({"parallel.deepspeed.nvme_path": "."}, "nvme_path needs something to offload"),
    "1-bit Adam": ({"file": '{"optimizer": {"type": "OneBitAdam"}}'}, 'optimizer.type="OneBitAdam" in the file'),
    "a schedule": ({"file": '{"scheduler": {"type": "OneCycle"}}'}, 'scheduler.type="OneCycle" in the file'),
    "a misspelt field": (
        {"file": '{"zero_optimization": {"stagee": 2}}'},
        "DeepSpeed does not accept 'file.json': stagee",
    ),
    "a wrong type": ({"file": '{"zero_optimization": {"reduce_scatter": "x"}}'}, "does not accept 'file.json'"),
    "a format": ({"file": '{"communication_data_type": "int8"}'}, 'communication_data_type="int8" is no format'),
}


@pytest.mark.parametrize(("settings", "words"), BAD.values(), ids=BAD)
def test_a_bad_config_is_refused_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if text := settings.get("file"):
        Path("file.json").write_text(text)
        others = {name: value for name, value in settings.items() if name != "file"}
        settings = {**others, "parallel.deepspeed.config": "file.json"}
    with pytest.raises(UsageError) as refused:
        build_model(run_of(settings))
    assert re.search(re.escape(words), str(refused.value)), refused.value


def test_sums_below_fp32_are_declared_and_a_file_can_ask_for_fp32(tmp_path: Path) -> None:
    assert run_of({"trainer.precision": "fp32"}).variances == {}
    assert "added in bf16" in run_of({}).variances["parallel/deepspeed"].reason
    path = tmp_path / "exact.json"
    path.write_text('{"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}')
    assert run_of({"parallel.deepspeed.config": str(path)}).variances == {}


def test_explain_counts_the_bytes_of_deepspeeds_partitions() -> None:
    expected = {
        1: {"weights": 2, "gradients": 2, "masters": 4 / 2},
        2: {"weights": 2, "gradients": 2 / 2, "masters": 4 / 2},
        3: {"weights": 2 / 2, "gradients": 2 / 2, "masters": 4 / 2},
    }
    for stage, per_element in expected.items():
        run = run_of({"parallel.deepspeed.stage": stage})
        model = build_model(run)
        numel = sum(placement.numel for placement in model.placements.values())
        measured = measure_bytes(run, model)
        for kind, width in per_element.items():
            assert measured[kind] == pytest.approx(width * numel, rel=0.01), (stage, kind)
        assert measured["optimizer state"] == pytest.approx(8 * numel / 2, rel=0.01)


@pytest.mark.parametrize(
    ("optimizer", "environment", "words"),
    [
        ("deepspeed_cpu_adam", {"CXX": "no-such-compiler"}, "a C++ compiler ('no-such-compiler' is not in the PATH"),
        ("deepspeed_adam", {"PATH": "/nowhere"}, "a C++ compiler ('c++' is not in the PATH; set CXX)"),
    ],
)
def test_an_operator_that_cannot_be_built_is_refused_and_the_missing_tool_is_named(
    monkeypatch: pytest.MonkeyPatch, optimizer: str, environment: dict[str, str], words: str
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as refused:
        run_of({"optimizer.name": optimizer})
    assert words in str(refused.value)


def test_the_engine_of_a_strategy_is_refused_without_a_stepper_or_with_a_missing_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A third party's strategy that declines sinks cannot forget what nothing else would do."""
    import mplug_deepspeed

    from mplug import hookimpl

    class Forgetful(mplug_deepspeed.DeepSpeed):
        @hookimpl
        def shard_states(self, run: Any, model: Any, needs: str) -> Any:
            from dataclasses import replace

            sharding = super().shard_states(run, model, needs)
            bucket = sharding.buckets[0]
            kept = replace(bucket, names=bucket.names[1:], starts=bucket.starts[1:], sizes=bucket.sizes[1:])
            return replace(sharding, buckets=(kept,))

    with monkeypatch.context() as patch:
        patch.setattr(mplug_deepspeed, "DeepSpeed", Forgetful)
        with pytest.raises(UsageError, match="does not have it"):
            build_model(run_of({}))
    monkeypatch.delattr(mplug_deepspeed.DeepSpeed, "build_stepper")
    with pytest.raises(UsageError, match="has no stepper that computes gradients without them"):
        build_model(run_of({}))


def test_files_are_the_hosts_memory_for_deepspeed(tmp_path: Path) -> None:
    """What a file says of DeepSpeed's own reads has no effect."""
    section = {"device": "nvme", "nvme_path": str(tmp_path), "pin_memory": True, "buffer_count": 7}
    zero = {"stage": 3, "offload_optimizer": section, "offload_param": section}
    found = effective(tmp_path, {"zero_optimization": zero})["zero_optimization"]
    assert found["offload_optimizer"] == found["offload_param"]
    assert found["offload_param"] == {"device": "cpu", "pin_memory": False, "buffer_count": 7}


def test_explain_says_what_is_in_files(tmp_path: Path) -> None:
    model = build_model(run_of({**OFFLOAD, "parallel.deepspeed.nvme_path": str(tmp_path)}))
    assert model.sharding is not None
    assert model.sharding.engine is not None
    names = set(model.sharding.engine.num_bytes)
    assert names == {
        "weights",
        "masters, in files",
        "gradients",
        "gradients of an update, in files",
        "buffers of gradient sums",
    }
