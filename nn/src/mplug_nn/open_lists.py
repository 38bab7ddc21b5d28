"""The open lists of the building blocks: activations, norms, kinds of rotary positions, scores of routers.

See `mplug.OpenList`. Imports no torch.
"""

from mplug.registry.open_lists import OpenList

OWNER = "mplug-nn"
ACTIVATIONS = OpenList(
    "activation",
    "mplug.activations",
    {
        name: f"mplug_nn.activations:{name.upper()}"
        for name in ("gelu", "gelu_tanh", "relu", "relu2", "swiglu", "geglu", "geglu_tanh", "clamped_swiglu")
    },
    OWNER,
)
"""Targets are `mplug_nn.ActivationFunction` objects."""
NORMS = OpenList(
    "norm",
    "mplug.norms",
    {
        name: f"mplug_nn.norm_functions:{name.upper()}"
        for name in ("layernorm", "rmsnorm", "offset_layernorm", "offset_rmsnorm")
    },
    OWNER,
)
"""Targets are `mplug_nn.NormFunction` objects."""
SCALINGS = OpenList(
    "scaling of rotary positions",
    "mplug.rotary_scalings",
    {name: f"mplug_nn.rotary:{name}" for name in ("linear", "llama3", "longrope", "yarn")},
    OWNER,
)
"""Targets are functions as `mplug_nn.rotary.linear` is; their module must not import torch."""
DIVISIONS = OpenList(
    "division of rotary positions",
    "mplug.rotary_divisions",
    {name: f"mplug_nn.rotary:{name}" for name in ("contiguous", "alternating", "axial")},
    OWNER,
)
"""Targets are functions as `mplug_nn.rotary.contiguous` is; their module must not import torch."""
SINKHORN = ("sinkhorn", "sinkhorn_sigmoid")
"""Scores that balance the load of the experts by the choice itself."""
SCORES = OpenList(
    "score of routers",
    "mplug.router_scores",
    {name: f"mplug_nn.scores:{name.upper()}" for name in ("softmax", "sigmoid", "softmax_of_chosen", *SINKHORN)},
    OWNER,
)
"""Targets are `mplug_nn.RouterScore` objects."""
