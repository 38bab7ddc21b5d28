"""Models with the weights of the transformers library's models, and how far the results of both are apart."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from library_models import relative, summed_loss
from torch import Tensor

from mplug import Model
from mplug_pretrained import conversion
from mplug_pretrained.transfer import fill_ours

Tensors = Mapping[str, Tensor]


class Seen(NamedTuple):
    """A micro batch: ours, and the arguments of the library."""

    ours: dict[str, Tensor]
    theirs: dict[str, Any]


def library_config(given: Mapping[str, Any]) -> Any:
    """The library's config of a config.json."""
    import transformers

    fields = {
        name: value for name, value in copy.deepcopy(dict(given)).items() if name not in ("model_type", "architectures")
    }
    return transformers.AutoConfig.for_model(given["model_type"], **fields)


def seeing_library(given: Mapping[str, Any], **options: str) -> Any:
    """The library's model for pictures and text, with its own initial values."""
    import transformers

    options = {"attn_implementation": "eager", **options}
    return transformers.AutoModelForImageTextToText.from_config(library_config(given), **options)


def changed(given: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with other values: of a field, or of one in a mapping ('vision_config.depth')."""
    found = {name: dict(value) if isinstance(value, dict) else value for name, value in given.items()}
    for name, value in changes.items():
        outer, _, inner = name.rpartition(".")
        (found[outer] if outer else found)[inner] = value
    return found


def ours_of(model: Model, tensors: Tensors) -> dict[str, Tensor]:
    """Tensors by their public names as those of our parameters. The map is linear."""

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        return tensors[name][tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))]

    found = {}
    for name, links in conversion(model).links.items():
        found[name] = torch.full(links[0].ours.shape, float("nan"), dtype=torch.float64)
        fill_ours(links, (0,) * found[name].dim(), found[name], read)
    return found


def distances_from(
    library: Any,
    arguments: Mapping[str, Any],
    model: Model,
    batch: dict[str, Tensor],
    public: Callable[[Tensors], Tensors] = dict,
    is_unused: Callable[[str, Tensor | None, Tensor], bool] = lambda *_: False,
) -> dict[str, float]:
    """The largest difference of logits, and of each gradient relative to its largest element.

    `public` gives the library's tensors their names in published folders. `is_unused(name, ours, expected)` says
    whether a parameter takes no part in this micro batch; it asserts what its gradients then are.
    """
    own, theirs = model.parameters(), dict(library.named_parameters())
    weights = public({name: x.detach() for name, x in theirs.items()})
    logits = library(**arguments).logits
    summed_loss(logits, batch["labels"]).backward()
    with torch.no_grad():
        for name, weight in ours_of(model, weights).items():
            own[name].copy_(weight)
    model.loss(batch)[0].backward()
    found = {"logits": relative(model.logits(batch), logits)}
    gradients = public({name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in theirs.items()})
    for name, expected in ours_of(model, gradients).items():
        gradient = own[name].grad
        if is_unused(name, gradient, expected):
            continue
        assert gradient is not None, name
        assert expected.abs().max() > 1e-9, f"{name} has no gradient in the library's model"
        found[name] = relative(gradient, expected)
    return found
