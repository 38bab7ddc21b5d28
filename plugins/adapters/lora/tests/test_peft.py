"""LoRA and DoRA compute what the library PEFT computes, in fp64 to 1e-10, and read and write its files bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from click.testing import CliRunner  # noqa: E402
from mplug_lora.modules import LowRank  # noqa: E402
from peft_models import (  # noqa: E402
    CASES,
    EXACT,
    Pair,
    box,
    exact,
    loaded,
    loaded_here,
    off,
    require_gradients_of_peft,
    run_of,
)
from safetensors.torch import load_file  # noqa: E402

from mplug.cli import main  # noqa: E402
from mplug_pretrained.external_form import conversion  # noqa: E402
from mplug_pretrained.transfer import fill_theirs  # noqa: E402
from mplug_testing import run_workers  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning:peft"
)  # in the libraries themselves
QUICK = ("llama", "llama dora", "gpt2", "qwen3-moe")


def cases(*quick: str) -> Any:
    """Every case; all but the quick ones are wide."""
    wide = pytest.mark.wide("families")
    return pytest.mark.parametrize("name", [one if one in quick else pytest.param(one, marks=wide) for one in CASES])


each = cases(*QUICK)


class Pairs:
    """Pairs by case and number format."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self.factory, self.made = factory, dict[tuple[str, torch.dtype], Pair]()

    def __call__(self, name: str, dtype: torch.dtype = torch.float64) -> Pair:
        if (name, dtype) not in self.made:
            self.made[name, dtype] = Pair(name, self.factory.mktemp("pair"), dtype)
        return self.made[name, dtype]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(tmp_path_factory)


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
    require_gradients_of_peft(model, pair.model, pair.family)
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
        found[tensor] = torch.zeros(made.shape(tensor), dtype=torch.float64)
        fill_theirs(made.public[tensor], found[tensor], lambda own, start, shape: box(values[own], start, shape))
    base = transformers.AutoModelForCausalLM.from_pretrained(pair.base, **exact())
    merged = peft.PeftModel.from_pretrained(base, pair.adapters).merge_and_unload()
    folder = pair.base.parent / "merged"
    merged.save_pretrained(folder)
    theirs = load_file(folder / "model.safetensors")
    assert found.keys() >= theirs.keys()
    for tensor, weight in theirs.items():
        assert off(found[tensor], weight) < EXACT, tensor


@pytest.mark.wide("families", quick=["qwen3-moe", "gpt2"])
@each
def test_files_of_peft_return_bit_by_bit_and_peft_loads_ours(
    pairs: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mplug.training.loop import train

    pair = pairs(name, torch.float32)
    monkeypatch.chdir(tmp_path)
    still = {"trainer.steps": 1, "trainer.eval_every": 0, "optimizer.lr": 1e-30, "optimizer.weight_decay": 0.0}
    run = run_of({**pair.settings, **still, "data.name": "mock"})
    run.directory = tmp_path / "runs" / "one"
    train(run)
    for form, folder in (("peft", "ours"), ("huggingface", "merged")):
        done = CliRunner().invoke(main, ["checkpoint", "export", "--to", form, folder, "--name", "one"])
        assert done.exit_code == 0, done.output
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "ours", pair.adapters))
    assert ours.keys() == theirs.keys()
    assert [tensor for tensor, values in ours.items() if not torch.equal(values, theirs[tensor])] == []
    base = transformers.AutoModelForCausalLM.from_pretrained(pair.base, **exact(torch.float32))
    again = peft.PeftModel.from_pretrained(base, tmp_path / "ours")
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, pair.model.eval()(tokens).logits)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        assert off(merged(tokens).logits, pair.model.eval()(tokens).logits) < 1e-5


def off_on_a_rank(settings: dict[str, Any], base: Path, expected: dict[str, Tensor]) -> float:
    """Be a rank: the largest error of its parts of the adapters that are loaded from a folder."""
    run, model = loaded_here(settings, base)
    found, errors = model.parameters(), []
    for name, whole in expected.items():
        for part in model.placements[name].boxes(run.rank):
            values = box(found[name].detach(), part.offset, part.shape)
            errors.append(float((values - box(whole, part.start, part.shape)).abs().max()))
    return max(errors)


@pytest.mark.parametrize("layout", ["tp2", pytest.param("dp2", marks=pytest.mark.wide("layouts"))])
def test_every_rank_loads_its_part_of_the_adapters(pairs: Any, layout: str) -> None:
    """DoRA stores a magnitude less the norm of its row, to which every rank that divides the row contributes."""
    pair = pairs("llama dora")
    _, model = loaded(pair)
    expected = {n: p.detach() for n, p in model.parameters().items() if p.requires_grad}
    assert any("magnitude" in name for name in expected), sorted(expected)
    for error in run_workers(2, off_on_a_rank, {**pair.settings, "parallel.layout": layout}, pair.base, expected):
        assert error < EXACT
