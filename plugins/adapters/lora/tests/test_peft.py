"""LoRA and DoRA compute what the library PEFT computes, and read and write its files bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from click.testing import CliRunner  # noqa: E402
from mplug_lora.modules import LowRank  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from mplug.checkpoint.adapter_files import adapter_conversion, load_adapters, refuse_other_adapters  # noqa: E402
from mplug.checkpoint.public_folder import open_public  # noqa: E402
from mplug.checkpoint.public_load import fill_from, weights_of  # noqa: E402
from mplug.checkpoint.public_weights import conversion  # noqa: E402
from mplug.checkpoint.transfer import fill_theirs  # noqa: E402
from mplug.cli import main  # noqa: E402
from mplug.config.defaults import default_settings  # noqa: E402
from mplug.config.sources import Settings, from_mapping, merge  # noqa: E402
from mplug.errors import UsageError  # noqa: E402
from mplug.model.build import allocate_parts, build_model  # noqa: E402
from mplug.model.model import Model  # noqa: E402
from mplug.model.pieces import make_pieces  # noqa: E402
from mplug.registry.entry_points import Registry  # noqa: E402
from mplug.registry.public import with_public_settings  # noqa: E402
from mplug.registry.resolve import resolve  # noqa: E402
from mplug.run.prepare import prepare  # noqa: E402
from mplug.run.run import Run  # noqa: E402
from mplug.testing import run_workers  # noqa: E402
from mplug.testing.harness import as_rank  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning:peft"
)  # in the libraries themselves
VOCAB = 64
COMMON: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None}
ROWS: dict[str, Any] = {
    **COMMON,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
NO_DROPOUT = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**ROWS))


def gpt2() -> Any:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**COMMON, **sizes, **NO_DROPOUT))


def qwen3_moe() -> Any:
    own = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**ROWS, **own, norm_topk_prob=True, router_aux_loss_coef=0.0)
    )


CASES: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "llama": (llama, {"target_modules": "all-linear"}, ["linear"]),
    "llama q v": (
        llama,
        {"target_modules": ["q_proj", "v_proj", "up_proj"], "use_rslora": True},
        ["q_proj", "v_proj", "up_proj"],
    ),
    "llama dora": (
        llama,
        {"target_modules": ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"], "use_dora": True},
        ["q_proj", "k_proj", "out", "gate_proj", "down"],
    ),
    "llama dora dropout": (
        llama,
        {"target_modules": ["q_proj", "v_proj", "down_proj"], "use_dora": True, "lora_dropout": 0.4},
        ["q_proj", "v_proj", "down"],
    ),
    "gpt2": (gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}, ["linear"]),
    "gpt2 dora": (
        gpt2,
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True},
        ["c_attn", "c_proj"],
    ),
    "qwen3-moe": (
        qwen3_moe,
        {"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS},
        ["q_proj", "o_proj", "experts"],
    ),
}


QUICK = ("llama", "llama dora", "gpt2", "qwen3-moe")


def cases(*quick: str) -> Any:
    """Every case; all but the quick ones are wide."""
    wide = pytest.mark.wide("families")
    return pytest.mark.parametrize("name", [one if one in quick else pytest.param(one, marks=wide) for one in CASES])


each = cases(*QUICK)


class Pair:
    """A model of PEFT with random adapters, its folders, and the settings of a run with both."""

    def __init__(self, name: str, folder: Path) -> None:
        make, own, targets = CASES[name]
        self.base, self.adapters = folder / "base", folder / "adapters"
        generator = torch.Generator().manual_seed(7)
        model = make()
        randomize(model.named_parameters(), generator, 0.2)
        model.save_pretrained(self.base)
        config = peft.LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", **own)
        self.model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(self.base), config)
        randomize(((n, p) for n, p in self.model.named_parameters() if "lora_" in n), generator, 0.1)
        self.model.save_pretrained(self.adapters)
        self.settings: dict[str, Any] = {
            "checkpoint.pretrained.path": str(self.base),
            "adapters.lora.rank": 3,
            "adapters.lora.alpha": 5,
            "adapters.lora.targets": targets,
            "adapters.lora.dora": own.get("use_dora", False),
            "adapters.lora.dropout": own.get("lora_dropout", 0.0),
            "adapters.lora.rank_stabilized": own.get("use_rslora", False),
            "adapters.lora.path": str(self.adapters),
        }


def randomize(parameters: Any, generator: torch.Generator, size: float) -> None:
    with torch.no_grad():
        for name, one in parameters:
            if "magnitude" in name:
                one.mul_(1 + 0.1 * torch.rand(one.shape, generator=generator))
            else:
                offset = 1.0 if "norm" in name or ".ln_" in name else 0.0
                one.copy_(torch.randn(one.shape, generator=generator) * size + offset)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Pair] = {}

    def pair(name: str) -> Pair:
        if name not in made:
            made[name] = Pair(name, tmp_path_factory.mktemp("pair"))
        return made[name]

    return pair


TINY = {"trainer.device": "cpu", "trainer.seq_length": 16, "trainer.global_batch_size": 2, "trainer.compile": "never"}


def run_of(settings: dict[str, Any]) -> Run:
    registry, overrides = Registry(), Settings()
    for name, value in {**TINY, **settings}.items():
        overrides = merge(overrides, from_mapping(value, "the test", tuple(name.split("."))))
    return prepare(resolve(registry, *with_public_settings(registry, default_settings(), overrides)))


def loaded(pair: Pair) -> tuple[Run, Model]:
    run = run_of(pair.settings)
    model = build_model(run)
    allocate_parts(run, model)
    fill_from(open_public(pair.base), run, model, weights_of(model))
    model.listen()
    load_adapters(run, model, make_pieces(model))
    return run, model


def published(values: dict[str, Tensor], model: Model) -> dict[str, Tensor]:
    """Tensors of our adapters under the names of PEFT."""
    made = adapter_conversion(model)
    found = {name: torch.zeros(made.shape(name)) for name in made.public}
    for name, tensor in found.items():
        fill_theirs(made.public[name], tensor, lambda own, start, shape: box(values[own], start, shape))
    return found


def box(whole: Tensor, start: Any, shape: Any) -> Tensor:
    return whole[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def dropped(x: Tensor, p: float) -> Tensor:
    """x [B, S, I] with the same mask [S, I] for every module of the same width."""
    generator = torch.Generator().manual_seed(x.shape[-1])
    return x * (torch.rand(x.shape[-2:], generator=generator) >= p) / (1 - p)


@pytest.fixture
def same_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT draws a mask for q, k and v each, from torch's generator; a linear of ours has one, of the sample's key."""
    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda self, x: dropped(x, self.p) if self.training else x)
    monkeypatch.setattr(
        LowRank, "_dropped", lambda self, x: dropped(x, self.dropout.probability) if self.dropout else x
    )


@cases(*QUICK, "llama dora dropout")
@pytest.mark.usefixtures("same_masks")
def test_loss_and_gradients_are_those_of_peft(pairs: Any, name: str) -> None:
    pair = pairs(name)
    pair.model.train()
    _, model = loaded(pair)
    tokens = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(3))
    zeros = torch.zeros(2, dtype=torch.int64)
    labels = torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), dim=1)
    batch = {
        "tokens": tokens,
        "positions": torch.arange(16)[None],
        "sample_ids": zeros,
        "keys": zeros,
        "labels": labels,
    }
    loss, count = model.loss(batch)
    (loss / count).backward()
    model.sinks.finish()
    pair.model.zero_grad()
    expected = pair.model(input_ids=tokens, labels=tokens).loss
    expected.backward()
    assert off((loss / count).detach(), expected.detach()) < 1e-5
    gradients = published({name: sink.buffer for name, sink in model.sinks.items()}, model)
    theirs = {
        name.replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector"): one.grad
        for name, one in pair.model.named_parameters()
        if one.requires_grad
    }
    assert gradients.keys() == theirs.keys()
    for tensor, gradient in gradients.items():
        assert off(gradient, theirs[tensor]) < 1e-5, tensor
    assert set(model.sinks) == {n for n in model.parameters() if "adapter" in n}


@each
def test_merged_weights_are_those_of_peft(pairs: Any, name: str) -> None:
    pair = pairs(name)
    _, model = loaded(pair)
    own = {name: one.data for name, one in model.parameters().items()}
    values = {**own, **{n: one.compute(*(own[i] for i in one.inputs)) for n, one in model.merges.items()}}
    made = conversion(model)
    found = {}
    for tensor in made.public:
        found[tensor] = torch.zeros(made.shape(tensor))
        fill_theirs(made.public[tensor], found[tensor], lambda own, start, shape: box(values[own], start, shape))
    base = transformers.AutoModelForCausalLM.from_pretrained(pair.base)
    merged = peft.PeftModel.from_pretrained(base, pair.adapters).merge_and_unload()
    folder = pair.base.parent / "merged"
    merged.save_pretrained(folder)
    theirs = load_file(folder / "model.safetensors")
    assert found.keys() >= theirs.keys()
    for tensor, weight in theirs.items():
        assert off(found[tensor], weight) < 1e-5, tensor


@each
def test_files_of_peft_return_bit_by_bit_and_peft_loads_ours(
    pairs: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mplug.training.loop import train

    pair = pairs(name)
    monkeypatch.chdir(tmp_path)
    still = {"trainer.steps": 1, "trainer.eval_every": 0, "optimizer.lr": 1e-30, "optimizer.weight_decay": 0.0}
    run = run_of({**pair.settings, **still, "data.name": "mock"})
    run.directory = tmp_path / "runs" / "one"
    train(run)
    done = CliRunner().invoke(main, ["checkpoint", "export", "--to", "peft", "ours", "--name", "one"])
    assert done.exit_code == 0, done.output
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "ours", pair.adapters))
    assert ours.keys() == theirs.keys()
    assert [tensor for tensor, values in ours.items() if not torch.equal(values, theirs[tensor])] == []
    base = transformers.AutoModelForCausalLM.from_pretrained(pair.base)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "ours")
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, pair.model.eval()(tokens).logits)
    done = CliRunner().invoke(main, ["checkpoint", "export", "--to", "hf", "merged", "--name", "one"])
    assert done.exit_code == 0, done.output
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        assert off(merged(tokens).logits, pair.model.eval()(tokens).logits) < 1e-5


def off_on_a_rank(settings: dict[str, Any], expected: dict[str, Tensor]) -> float:
    """Be a rank: the largest error of its parts of the adapters that are loaded from a folder."""
    run = as_rank(run_of(settings))
    model = build_model(run)
    allocate_parts(run, model)
    fill_from(open_public(Path(settings["checkpoint.pretrained.path"])), run, model, weights_of(model))
    model.listen()
    load_adapters(run, model, make_pieces(model))
    found, errors = model.parameters(), []
    for name, whole in expected.items():
        for part in model.placements[name].boxes(run.rank):
            values = box(found[name].detach(), part.offset, part.shape)
            errors.append(float((values - box(whole, part.start, part.shape)).abs().max()))
    return max(errors)


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_every_rank_loads_its_part_of_the_adapters(pairs: Any, layout: str) -> None:
    """DoRA stores a magnitude less the norm of its row, to which every rank that divides the row contributes."""
    pair = pairs("llama dora")
    _, model = loaded(pair)
    expected = {n: p.detach() for n, p in model.parameters().items() if p.requires_grad}
    assert any("magnitude" in name for name in expected), sorted(expected)
    for error in run_workers(2, off_on_a_rank, {**pair.settings, "parallel.layout": layout}, expected):
        assert error < 1e-5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"adapters.lora.targets": ["q_proj"]},
            "are those of another base model or of other layers: the run has no place",
        ),
        ({"adapters.lora.rank": 4}, "have r=3 in adapter_config.json, and the run has 4"),
        ({"adapters.lora.rank_stabilized": True}, "have use_rslora=False"),
    ],
    ids=str,
)
def test_adapters_that_do_not_fit_the_run_are_refused(pairs: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        refuse_other_adapters(build_model(run_of({**pairs("llama").settings, **changes})))
    assert said in str(caught.value)


def test_adapters_of_another_base_model_are_refused(pairs: Any) -> None:
    wider = {**pairs("llama").settings, "checkpoint.pretrained.path": str(pairs("qwen3-moe").base)}
    targets = {"adapters.lora.targets": ["linear"], "adapters.lora.path": str(pairs("llama").adapters)}
    with pytest.raises(UsageError, match="are those of another base model or of other layers"):
        refuse_other_adapters(build_model(run_of({**wider, **targets})))
