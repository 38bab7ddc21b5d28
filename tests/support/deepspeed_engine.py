"""Checkpoints that DeepSpeed's own engine writes, without mplug's strategy, and the values that the engine then has."""

import os
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.999), 1e-8, 0.1
States = dict[str, dict[str, Tensor]]
"""By the name of a parameter: its fp32 weight, exp_avg and exp_avg_sq."""
LLAMA: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rope_theta": 500.0,
    "rms_norm_eps": 1e-4,
}
"""A vocabulary and norms whose elements two ranks cannot halve without padding."""


class WithLoss(nn.Module):
    """A model of ours as DeepSpeed trains it: a module that returns its mean loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.module = model.module
        self._loss = [model.loss]

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The mean loss of a micro batch."""
        loss, num_targets = self._loss[0](batch)
        return loss / num_targets


def ours(settings: dict[str, Any]) -> tuple[nn.Module, set[str], list[Any]]:
    """A model of ours, the names of its parameters that decay, and this rank's micro batches of three steps.

    The last step has the first samples of the data, with which an imported run begins.
    """
    from mplug.model.build import allocate_parts, build_model
    from mplug.model.memory import initialize
    from mplug.run.prepare import prepare
    from mplug.training.assembly import build_loader
    from mplug_pretrained.public_load import weights_of
    from mplug_testing.harness import tiny_config

    run = prepare(tiny_config(settings))
    model = build_model(run)
    allocate_parts(run, model)
    held = weights_of(model)
    initialize({one.name: one.values for one in held}, {one.name: one.placement for one in held}, 0, 1)
    loader = build_loader(run, "train")
    third, first, second = (list(loader.take(run.config.trainer.global_batch_size)) for _ in range(3))
    own = dist.get_rank()
    batches = [{**step[own], "keys": torch.zeros_like(step[own]["sample_ids"])} for step in (first, second, third)]
    decays = {f"module.{name}" for name, one in model.placements.items() if one.parameter.decays}
    return WithLoss(model), decays, [(batch,) for batch in batches]


class Llama(nn.Module):
    """A Llama of the transformers library; DeepSpeed trains the inner model, so the names are the library's."""

    @staticmethod
    def of(frozen: str, **changes: Any) -> Any:
        """A random one. Parameters whose names contain `frozen` are not trained."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(1)
        model = LlamaForCausalLM(LlamaConfig(**{**LLAMA, **changes}))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen or frozen not in name)
        return model


def llama(settings: dict[str, Any]) -> tuple[nn.Module, set[str], list[Any]]:
    """As `ours`, of the transformers library."""
    model = Llama.of(**{name: value for name, value in settings.items() if name != "same_data"})
    decays = {name for name, parameter in model.named_parameters() if parameter.dim() > 1}
    size = (3, 2, 12)
    seed = 0 if settings.get("same_data") else dist.get_rank()
    windows = torch.randint(0, LLAMA["vocab_size"], size, generator=torch.Generator().manual_seed(seed))
    return model, decays, [{"input_ids": window, "labels": window} for window in windows]


def saved(folder: Path, kind: str, settings: dict[str, Any], config: dict[str, Any]) -> tuple[States, States]:
    """Be one rank: train two steps, save, train one more. The states after the second and after the third step."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    warnings.simplefilter("ignore")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # building it takes a compiler and half a minute
    model, decays, batches = {"ours": ours, "llama": llama}[kind](settings)
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    groups = [
        {"params": [one for name, one in trained if name in decays], "weight_decay": DECAY},
        {"params": [one for name, one in trained if name not in decays], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    if "tensor_parallel" in config:
        model = deepspeed.tp_model_init(model, tp_size=dist.get_world_size(), dtype=torch.float32)
        groups = [{"params": list(model.parameters())}]
    full = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        **config,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=full, dist_init_required=False)
    found = []
    for step, batch in enumerate(batches, 1):
        answer = engine(**batch) if isinstance(batch, dict) else engine(*batch)
        engine.backward(answer.loss if isinstance(batch, dict) else answer)
        engine.step()
        if step == 2:
            engine.save_checkpoint(str(folder), client_state={"args": Namespace(lr=LR)})
        if step >= 2:
            found.append(states_of(engine))
    engine.destroy()
    return found[0], found[1]


def states_of(engine: Any) -> States:
    """What DeepSpeed itself says about every parameter; without ZeRO it knows the weights alone."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    _link_states(engine.optimizer)
    found = {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        states = {"weight": safe_get_full_fp32_param(parameter)}
        if states["weight"] is None:
            states = {"weight": parameter}
        else:
            states |= {key: safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")}
        found[name.removeprefix("module.")] = {key: value.detach().clone() for key, value in states.items()}
    return found


def _link_states(optimizer: Any) -> None:
    """DeepSpeed links parameters with their states in the first step of stages 1 and 2, when torch's AdamW has none."""
    for number, group in enumerate(getattr(optimizer, "bit16_groups", ())):
        (flat,) = optimizer.optimizer.param_groups[number]["params"]
        for parameter in group:
            if parameter._hp_mapping is not None:
                parameter._hp_mapping.set_optim_state_fragment(flat, optimizer.optimizer.state[flat])


def saved_in_turn(cases: list[tuple[Path, str, dict[str, Any], dict[str, Any]]]) -> list[tuple[States, States]]:
    """Be one rank of several runs: importing DeepSpeed takes most of a worker's time."""
    return [saved(*case) for case in cases]
