"""A config file of DeepSpeed: what the run fills in, what reaches DeepSpeed unchanged, and what is refused at once."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from layout_runs import assert_refused, under

from mplug import UsageError, hookimpl
from mplug.model.build import build_model
from mplug_estimates import measure_bytes
from mplug_testing.harness import tiny_run

pytestmark = pytest.mark.skipif(
    find_spec("mplug_deepspeed") is None or find_spec("deepspeed") is None, reason="it is not installed"
)

BASE: dict[str, Any] = {"trainer.precision": "bf16", "parallel.layout": "deepspeed2", "model.num_layers": 2}


def run_of(settings: dict[str, Any]) -> Any:
    return tiny_run({**BASE, **settings})


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


OFFLOADED = "deepspeed2 parallel.deepspeed.stage=3 parallel.deepspeed.offload_optimizer=true"
HUGGING_FACE = json.loads("""{
    "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3, "overlap_comm": true, "contiguous_gradients": true, "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 12345, "stage3_gather_16bit_weights_on_model_save": true
    },
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
}""")
"""The file that Hugging Face's documents recommend for stage 3."""


def test_auto_is_filled_in_and_everything_else_reaches_deepspeed_unchanged(tmp_path: Path) -> None:
    found = effective(tmp_path, HUGGING_FACE)
    expected = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
        "steps_per_print": 2000,
    }
    assert {name: found[name] for name in expected} == expected
    zero = {"reduce_bucket_size": 32 * 32, "stage3_param_persistence_threshold": 320}
    zero |= {"stage3_max_live_parameters": 12345, "stage3_gather_16bit_weights_on_model_save": True}
    assert {name: found["zero_optimization"][name] for name in zero} == zero
    assert "auto" not in json.dumps(found)
    assert not {"optimizer", "scheduler"} & set(found)


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


BAD = {
    "pp2deepspeed2": "parallel/pp runs parts of the model in a schedule",
    "fsdp2deepspeed2": "both shard the optimizer state",
    "zero2deepspeed2": "parallel/zero and parallel/deepspeed both shard the optimizer state",
    "deepspeed2 parallel.deepspeed.stage=4": "parallel.deepspeed.stage",
    "deepspeed2 trainer.precision=fp64": "computes in fp32, bf16 or fp16",
    "deepspeed2 parallel.deepspeed.stage=3 model.frozen=[embedding]": "'embedding.token.weight' is frozen",
    "deepspeed2 parallel.deepspeed.offload_param=true": "offload_param=true needs stage 3, and the stage is 1",
    "deepspeed2 trainer.graphs=true": "trainer.graphs",
    "ep2deepspeed2 model.name=mixtral model.num_experts=4 model.qk_norm=false": "is summed over others",
    "deepspeed2 parallel.deepspeed.config=nowhere.json": "'nowhere.json' cannot be read: No such file",
    "deepspeed2 parallel.deepspeed.nvme_path=.": "nvme_path needs something to offload",
    f"{OFFLOADED} parallel.deepspeed.nvme_path=nowhere": "'nowhere': this is no folder in which",
}
"""Layouts, and words of the refusal."""
NVME = '{"zero_optimization": {"stage": %d, "offload_optimizer": {"device": "nvme"%s}}}'
BAD_FILES = {
    "[]": "must be a JSON object",
    "{,": "is not valid JSON",
    '{"bf16": {}, "bf16": {}}': "the key 'bf16' appears twice",
    '{"zero_optimization": {"stage": 0}}': "zero_optimization.stage=0 is not supported",
    NVME % (3, ""): 'offload_optimizer.device="nvme" needs a folder: nvme_path',
    NVME % (2, ', "nvme_path": "."'): "needs stage 3, and the stage is 2",
    NVME % (3, ', "nvme_path": "nowhere"'): 'nvme_path="nowhere" in the file, and parallel.deepspeed.nvme_path=. in',
    '{"optimizer": {"type": "OneBitAdam"}}': 'optimizer.type="OneBitAdam" in the file',
    '{"scheduler": {"type": "OneCycle"}}': 'scheduler.type="OneCycle" in the file',
    '{"zero_optimization": {"stagee": 2}}': "DeepSpeed does not accept 'file.json': stagee",
    '{"zero_optimization": {"reduce_scatter": "x"}}': "does not accept 'file.json'",
    '{"communication_data_type": "int8"}': 'communication_data_type="int8" is no format',
}
"""Texts of a config file of DeepSpeed, and words of the refusal."""


@pytest.mark.parametrize("layout", BAD)
def test_a_bad_config_is_refused_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(layout, BASE, BAD[layout])


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_bad_file_is_refused_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file.json").write_text(text)
    twice = f"{OFFLOADED} parallel.deepspeed.nvme_path=." if "nowhere" in text else "deepspeed2"
    assert_refused(f"{twice} parallel.deepspeed.config=file.json", BASE, BAD_FILES[text])


def test_sums_below_fp32_are_declared_and_a_file_can_ask_for_fp32(tmp_path: Path) -> None:
    assert run_of({"trainer.precision": "fp32"}).variances == {}
    assert "added in bf16" in run_of({}).variances["parallel/deepspeed"].reason
    path = tmp_path / "exact.json"
    path.write_text('{"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}')
    assert run_of({"parallel.deepspeed.config": str(path)}).variances == {}


def test_explain_counts_the_bytes_of_deepspeeds_partitions() -> None:
    for stage, widths in {1: (2, 2), 2: (2, 2 / 2), 3: (2 / 2, 2 / 2)}.items():
        per_element = dict(zip(("weights", "gradients"), widths, strict=True))
        per_element |= {"masters": 4 / 2, "optimizer state": 8 / 2}
        run = run_of({"parallel.deepspeed.stage": stage})
        model = build_model(run)
        numel = sum(placement.numel for placement in model.placements.values())
        measured = measure_bytes(run, model)
        for kind, width in per_element.items():
            assert measured[kind] == pytest.approx(width * numel, rel=0.01), (stage, kind)


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

    class Forgetful(mplug_deepspeed.DeepSpeed):
        @hookimpl
        def shard_states(self, run: Any, model: Any) -> Any:
            sharding = super().shard_states(run, model)
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
    model = build_model(tiny_run(under(f"{OFFLOADED} parallel.deepspeed.nvme_path={tmp_path}", BASE)))
    assert model.sharding is not None
    assert model.sharding.engine is not None
    in_files = {"masters, in files", "gradients of an update, in files"}
    assert set(model.sharding.engine.num_bytes) == {"weights", "gradients", "buffers of gradient sums", *in_files}
