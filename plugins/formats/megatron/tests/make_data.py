"""Make the checkpoints of `data`: two tensor-parallel ranks of megatron-core on a CPU.

    pip install --no-deps megatron-core==0.16.1
    python plugins/formats/megatron/tests/make_data.py plugins/formats/megatron/tests/data

Each folder has the checkpoint and `expected.safetensors`: tokens, and the logits that megatron-core computes.
"""

import argparse
import contextlib
import enum
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file

RANKS, VOCAB, PADDED, LENGTH = 2, 30, 32, 12
SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {
        "config": {
            "num_query_groups": 2,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
        },
        "model": {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False, "rotary_base": 500},
    },
    "gpt": {
        "config": {"num_query_groups": 4, "normalization": "LayerNorm", "add_bias_linear": True},
        "model": {"position_embedding_type": "learned_absolute", "share_embeddings_and_output_weights": True},
    },
}


class Backend(enum.Enum):
    """A class that no reader of the checkpoint knows."""

    LOCAL = 1


def work(rank: int, kind: str, folder: Path, port: int) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), LOCAL_RANK=str(rank))
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    fused = ("bias_activation_fusion", "masked_softmax_fusion", "bias_dropout_fusion", "gradient_accumulation_fusion")
    settings = {**SHAPE, **KINDS[kind]["config"], **dict.fromkeys(fused, False), "use_cpu_initialization": True}
    settings |= {"layernorm_epsilon": 1e-5, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    config = TransformerConfig(**settings, tensor_model_parallel_size=RANKS, pipeline_dtype=torch.float32)
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    model = GPTModel(config, spec, vocab_size=PADDED, max_sequence_length=LENGTH, **KINDS[kind]["model"]).eval()
    for name, parameter in model.named_parameters():
        whole = not getattr(parameter, "tensor_model_parallel", False)  # the ranks have the same values
        generator = torch.Generator().manual_seed(sum(map(ord, name)) + (0 if whole else rank))
        noise = 0.3 * torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(noise + ("norm" in name and name.endswith("weight")))
    names = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "normalization")
    arguments = argparse.Namespace(**{name: getattr(config, name) for name in names}, attention_backend=Backend.LOCAL)
    arguments.group_query_attention, arguments.norm_epsilon, arguments.rotary_base = True, 1e-5, 500
    arguments.params_dtype = torch.float32
    state = {**model.sharded_state_dict(prefix=""), "args": arguments, "iteration": 7}
    dist_checkpointing.save(state, str(folder / "iter_0000007"))
    tokens = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
    with torch.no_grad():
        parts = model(tokens, torch.arange(LENGTH)[None].expand(2, -1), mask)
    logits = gather_from_tensor_model_parallel_region(parts)
    if rank == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text("7\n")
        save_file({"tokens": tokens, "logits": logits[..., :VOCAB].contiguous()}, folder / "expected.safetensors")
    dist.barrier()


def main() -> None:
    for number, kind in enumerate(KINDS):
        folder = Path(sys.argv[1]) / kind
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "iter_0000007").mkdir(parents=True)
        mp.spawn(work, args=(kind, folder, 29650 + number), nprocs=RANKS)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
