"""Every slot in eager fp32, whatever the precision around it: what other kernels are checked against."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from mplug import Offer, Site, hookimpl

if TYPE_CHECKING:
    from mplug import Run


class Reference:
    """The compositions of `mplug.nn`, computed in fp32."""

    class Config(BaseModel):
        """It has nothing to set."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    @hookimpl
    def offer(self) -> list[Offer]:
        """Attention, norms, activation and loss."""
        from mplug.nn import attention, loss, mlp, norm

        plain: dict[str, Callable[..., Any]] = {
            "Attention.core": attention.attention,
            "Attention.prepare_qk": attention.prepare_qk,
            "Norm.norm_residual": norm.norm_residual,
            "MLP.activation": mlp.activation,
            "Loss.cross_entropy": loss.cross_entropy,
        }
        return [Offer({slot: _in_fp32(function)}, _supports) for slot, function in plain.items()]


def _supports(site: Site, run: "Run") -> bool | str:
    return f"it does not offer {', '.join(sorted(site.needs))}" if site.needs else True


def _in_fp32(function: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def widened(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def narrowed(value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, tuple):
            return tuple(narrowed(one, dtype) for one in value)
        return value.to(dtype) if value.is_floating_point() else value

    def in_fp32(first: torch.Tensor, *rest: Any, **named: Any) -> Any:
        wide = [widened(value) for value in (first, *rest)]
        result = function(*wide, **{name: widened(value) for name, value in named.items()})
        return narrowed(result, first.dtype)

    return in_fp32
