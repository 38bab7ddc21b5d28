"""Random tiny models of the transformers library with adapters of PEFT, their folders, and runs that begin with them.

Test files import it after `pytest.importorskip("peft")`.
"""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from exported_folders import ONE_STEP
from library_models import TABLES, summed_loss, wide
from mplug_huggingface_format.opened import open_folder
from mplug_lora.fields import FILE, WEIGHTS
from published import FAMILIES, model_of, resolved
from safetensors.torch import load_file, save_file
from torch import Tensor

from mplug.model.build import allocate_parts, build_model
from mplug.model.model import Model
from mplug.model.pieces import make_pieces
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug.training.loop import train
from mplug_pretrained.adapter_files import adapter_conversion, adapters_of, load_adapters
from mplug_pretrained.public_load import fill_from, weights_of
from mplug_pretrained.transfer import fill_theirs
from mplug_testing.harness import as_rank

VOCAB = 64
EXACT = 1e-10
ROWS: dict[str, Any] = {
    **TABLES["published"]["rows"],
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def llama() -> Any:
    return model_of(model_type="llama", **ROWS)


def gpt2() -> Any:
    return FAMILIES["gpt2"](vocab_size=VOCAB, n_embd=16, n_layer=2, n_positions=32)


def qwen3_moe() -> Any:
    own = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8}
    return model_of(model_type="qwen3_moe", **ROWS, **own, norm_topk_prob=True, router_aux_loss_coef=0.0)


def case(base: Any, targets: str, *ours: str, **more: Any) -> tuple[Any, dict[str, Any], list[str]]:
    modules = targets if targets == "all-linear" else targets.split()
    return base, {"target_modules": modules, **more}, [*ours] or list(modules)


CASES: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "llama": case(llama, "all-linear", "linear"),
    "llama q v": case(llama, "q_proj v_proj up_proj", use_rslora=True),
    "llama dora": case(
        *(llama, "q_proj k_proj o_proj gate_proj down_proj"),
        *("q_proj", "k_proj", "out", "gate_proj", "down"),
        use_dora=True,
    ),
    "llama dora dropout": case(
        llama, "q_proj v_proj down_proj", "q_proj", "v_proj", "down", use_dora=True, lora_dropout=0.4
    ),
    "gpt2": case(gpt2, "c_attn c_proj c_fc", "linear", fan_in_fan_out=True),
    "gpt2 dora": case(gpt2, "c_attn c_proj", fan_in_fan_out=True, use_dora=True),
    "qwen3-moe": case(qwen3_moe, "q_proj o_proj", "q_proj", "o_proj", "experts", target_parameters=EXPERTS),
}
"""The base, the fields of LoraConfig, and adapters.lora.targets."""


class Pair:
    """A model of PEFT with random adapters, its folders, and the settings of a run with both."""

    def __init__(self, name: str, folder: Path, dtype: torch.dtype, rank: int = 3) -> None:
        make, own, targets = CASES[name]
        self.base, self.adapters = folder / "base", folder / "adapters"
        generator = torch.Generator().manual_seed(7)
        model = make()
        randomize(model.named_parameters(), generator, 0.2)
        model.to(dtype).save_pretrained(self.base)
        config = peft.LoraConfig(r=rank, lora_alpha=5, task_type="CAUSAL_LM", **own)
        self.family = model.config.model_type
        with wide(self.family) if dtype is torch.float64 else nullcontext():
            base = transformers.AutoModelForCausalLM.from_pretrained(self.base, **exact(dtype))
        self.model = peft.get_peft_model(base, config).to(dtype)
        randomize(((n, p) for n, p in self.model.named_parameters() if "lora_" in n), generator, 0.1)
        self.model.save_pretrained(self.adapters)
        self.settings: dict[str, Any] = {
            "checkpoint.pretrained.path": str(self.base),
            "adapters.lora.rank": rank,
            "adapters.lora.alpha": 5,
            "adapters.lora.targets": targets,
            "adapters.lora.dora": own.get("use_dora", False),
            "adapters.lora.dropout": own.get("lora_dropout", 0.0),
            "adapters.lora.rank_stabilized": own.get("use_rslora", False),
            "adapters.lora.path": str(self.adapters),
            "trainer.precision": "fp64" if dtype is torch.float64 else "fp32",
        }


def exact(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """How the library loads a model in a number format, with experts in plain torch."""
    return {"dtype": dtype, "attn_implementation": "eager", "experts_implementation": "eager"}


def randomize(parameters: Any, generator: torch.Generator, size: float) -> None:
    with torch.no_grad():
        for name, one in parameters:
            if "magnitude" in name:
                one.mul_(1 + 0.1 * torch.rand(one.shape, generator=generator))
            else:
                offset = 1.0 if "norm" in name or ".ln_" in name else 0.0
                one.copy_(torch.randn(one.shape, generator=generator) * size + offset)


TINY = {"trainer.device": "cpu", "trainer.seq_length": 16, "trainer.global_batch_size": 2, "trainer.compile": "never"}


def run_of(settings: dict[str, Any]) -> Run:
    return prepare(resolved({**TINY, **settings}))


def loaded(pair: Pair) -> tuple[Run, Model]:
    return loaded_here(pair.settings, pair.base)


def loaded_here(settings: dict[str, Any], base: Path) -> tuple[Run, Model]:
    """The base model and its adapters; this rank's part of them if there is a process group."""
    run = as_rank(run_of(settings))
    model = build_model(run)
    allocate_parts(run, model)
    fill_from(open_folder(base), run, model, weights_of(model))
    model.listen(model.master_dtype)
    load_adapters(run, model, make_pieces(model))
    return run, model


def write_adapters(model: Model, folder: Path, dtype: torch.dtype = torch.float64) -> int:
    """Write random adapters of a model, as an export does; the number of their tensors."""
    folder.mkdir()
    made = adapter_conversion(model)
    generator = torch.Generator().manual_seed(3)
    magnitudes = {name: "magnitude" in name for name in made.public}
    drawn = {n: torch.randn(made.shape(n), generator=generator, dtype=dtype) * 0.2 for n in made.public}
    save_file({n: one.abs() + 0.5 if magnitudes[n] else one for n, one in drawn.items()}, folder / WEIGHTS)
    (folder / FILE).write_text(json.dumps(dict(adapters_of(model).config)))
    return len(drawn)


def require_adapters_return(settings: dict[str, Any], adapters: Path, folder: Path, cli: Any) -> None:
    """Fail unless a run that begins with adapters exports them bit by bit; the merged model is `folder`/merged."""
    run = run_of({**settings, **ONE_STEP})
    run.directory = folder / "runs" / "adapted"
    train(run)
    for form, name in (("peft", "ours"), ("huggingface", "merged")):
        done = cli("checkpoint", "export", "--to", form, name)
        assert done.returncode == 0, done.stderr
    ours, theirs = (load_file(one / WEIGHTS) for one in (folder / "ours", adapters))
    assert ours.keys() == theirs.keys()
    assert [name for name, values in ours.items() if not torch.equal(values, theirs[name])] == []


def published(values: dict[str, Tensor], model: Model) -> dict[str, Tensor]:
    """Tensors of our adapters under the names of PEFT."""
    made = adapter_conversion(model)
    found = {name: torch.zeros(made.shape(name), dtype=torch.float64) for name in made.public}
    for name, tensor in found.items():
        fill_theirs(made.public[name], tensor, lambda own, start, shape: box(values[own], start, shape))
    return found


def box(whole: Tensor, start: Any, shape: Any) -> Tensor:
    return whole[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]


def require_gradients_of_peft(model: Model, theirs: Any, module: str) -> None:
    """Fail unless loss and gradients are those of PEFT in fp64, in which `module` of the library then computes."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, theirs.get_base_model().config.vocab_size, (2, 16), generator=generator)
    labels = torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), dim=1)
    zeros = torch.zeros(2, dtype=torch.int64)
    batch = {
        "tokens": tokens,
        "positions": torch.arange(16)[None],
        "labels": labels,
        "sample_ids": zeros,
        "keys": zeros,
    }
    loss, _ = model.loss(batch)
    loss.backward()
    model.sinks.finish()
    theirs.zero_grad()
    with wide(module):
        expected = summed_loss(theirs(input_ids=tokens, use_cache=False).logits, labels)
    expected.backward()
    assert off(loss.detach(), expected.detach()) < EXACT
    found = published({name: sink.buffer for name, sink in model.sinks.items()}, model)
    gradients = {
        name.replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector"): one.grad
        for name, one in theirs.named_parameters()
        if one.requires_grad
    }
    assert found.keys() == gradients.keys()
    for name, gradient in found.items():
        assert off(gradient, gradients[name]) < EXACT, name


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
