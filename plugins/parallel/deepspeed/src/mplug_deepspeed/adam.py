"""DeepSpeed's Adam operators as optimizers of pieces. Their states have the names and the meaning of AdamW's."""

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from mplug import Optimizer, UsageError, hookimpl
from mplug_deepspeed.toolchain import refuse_without_toolchain

if TYPE_CHECKING:
    from torch import Tensor

    from mplug import Piece, Run, RunConfig, StepScalars


class AdamConfig(BaseModel):
    """Learning rate, decay and moments."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(1e-3, gt=0, allow_inf_nan=False, description="peak learning rate; the schedule scales it")
    weight_decay: float = Field(
        0.1, ge=0, allow_inf_nan=False, description="decoupled decay of parameters with at least two dimensions"
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="decay rate of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay rate of the second moment")
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False, description="added to the square root of the second moment")


class FusedAdam:
    """DeepSpeed's fused Adam: one launch for all pieces, on their device."""

    Config = AdamConfig
    NAME = "deepspeed_adam"
    fine_tuning: ClassVar[dict[str, dict[str, Any]]] = {"optimizer": {"lr": 2e-5, "weight_decay": 0.0}}

    captures = "reads on the CPU whether a step is skipped"
    """The number of updates is a number of the CPU."""

    def __init__(self, config: AdamConfig) -> None:
        self.config = config

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse a machine on which DeepSpeed cannot build the operator."""
        refuse_without_toolchain(self.NAME)

    @hookimpl
    def build_optimizer(self, run: "Run", pieces: "list[Piece]") -> "Optimizer":
        """An optimizer of these pieces."""
        refuse_without_toolchain(self.NAME, needs_nvcc=run.device == "cuda")
        return AdamOfPieces(pieces, self.config, "FusedAdam")


class CPUAdam(FusedAdam):
    """DeepSpeed's Adam for masters and states in the host's memory (ZeRO-Offload, arXiv 2101.06840)."""

    NAME = "deepspeed_cpu_adam"

    @hookimpl
    def build_optimizer(self, run: "Run", pieces: "list[Piece]") -> "Optimizer":
        """An optimizer of these pieces; UsageError if they are on a GPU."""
        from torch._subclasses.fake_tensor import FakeTensor  # imports torch

        refuse_without_toolchain(self.NAME)
        for piece in pieces:
            if piece.master.device.type != "cpu" and not isinstance(piece.master, FakeTensor):
                raise UsageError(
                    f"optimizer.name={self.NAME} updates masters in the host's memory, and that of '{piece.name}' is "
                    f"on {piece.master.device}; set parallel.deepspeed.offload_optimizer=true, or use another optimizer"
                )
        return AdamOfPieces(pieces, self.config, "DeepSpeedCPUAdam")


class AdamOfPieces(Optimizer):
    """One of DeepSpeed's Adam classes over the masters of pieces. The CPU reads in every step whether it is skipped."""

    def __init__(self, pieces: "list[Piece]", config: AdamConfig, kind: str) -> None:
        import torch

        self.pieces, self.config, self.kind = pieces, config, kind
        self._states = {
            piece.name: {
                "exp_avg": torch.zeros_like(piece.master),
                "exp_avg_sq": torch.zeros_like(piece.master),
                "step": torch.zeros((), device=piece.master.device),
            }
            for piece in pieces
        }
        self._built: Any = None

    def _optimizer(self) -> Any:
        """DeepSpeed's optimizer; the first call builds the operator, which takes half a minute once per machine."""
        if self._built is not None:
            return self._built
        from deepspeed.ops import adam  # imports torch and takes seconds
        from torch import nn

        config = self.config
        parameters = {piece.name: nn.Parameter(piece.master) for piece in self.pieces}
        decayed, plain = ([parameters[p.name] for p in self.pieces if p.parameter.decays is on] for on in (True, False))
        groups = [{"params": own, "weight_decay": 0.0} for own in (decayed, plain)]
        self._built = getattr(adam, self.kind)(groups, betas=(config.beta1, config.beta2), eps=config.eps)
        self._parameters = parameters
        return self._built

    def step(self, scalars: "StepScalars") -> None:
        """Update every piece's master once."""
        if not self.pieces or bool(scalars.skip > 0):
            return
        optimizer, lr = self._optimizer(), float(scalars.lr)
        first = self._states[self.pieces[0].name]["step"]
        for piece in self.pieces:
            state, parameter = self._states[piece.name], self._parameters[piece.name]
            parameter.grad = piece.gradient.mul_(scalars.scale)
            moments = {name: state[name] for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {**moments, "step": int(first)}
        for group, decay in zip(optimizer.param_groups, (float(scalars.weight_decay), 0.0), strict=True):
            group["lr"], group["weight_decay"], group["step"] = lr, decay, int(first)
        optimizer.step()
        for state in self._states.values():
            state["step"].add_(1)

    def state(self, piece: "Piece") -> "dict[str, Tensor]":
        """The live moments and step count of a piece."""
        return dict(self._states[piece.name])
