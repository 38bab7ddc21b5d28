"""Building blocks for model authors, in plain torch without anything distributed.

Each module has *slots*: callable attributes that plugins can replace. `SLOTS` lists the names by which plugins know
them. A slot holds a composition in plain torch until the host puts a plugin's supplier there. Strategies read the plan,
never the module.
"""

from mplug.nn.activations import ActivationFunction
from mplug.nn.ahead import DepthAhead, TokensAhead
from mplug.nn.attention import Attention, DotProductAttention, scaled_dot_product
from mplug.nn.cache import Cache, CacheSize
from mplug.nn.decoder import Block, Decoder, DenseBlock, SparseBlock, TokenEmbedding, decoder_plan
from mplug.nn.description import Description, describe, flops_of, weights_per_token
from mplug.nn.embedding import Embedding
from mplug.nn.experts import Experts, Route, within_capacity
from mplug.nn.fusible import Fusible, fusible_norm, normed, states
from mplug.nn.gathered_form import GatheredForm
from mplug.nn.gemm import Gemm, weight_gradient
from mplug.nn.grouped import GroupedProduct, grouped_linear
from mplug.nn.head import Head
from mplug.nn.inits import Entries, Inits
from mplug.nn.latent import LatentAttention
from mplug.nn.linear import ADAPTERS, Linear, boundary_of
from mplug.nn.loss import Loss
from mplug.nn.mlp import MLP, Activation
from mplug.nn.moe import MixtureOfExperts
from mplug.nn.norm import Norm
from mplug.nn.normal import NORMAL_TAIL, NORMAL_TAIL_END, NORMAL_TAIL_SLOPE
from mplug.nn.norms import NormFunction
from mplug.nn.operator import fake, operator
from mplug.nn.packed_heads import PackedHeads, packed_heads_of, passing_through, with_packed_heads
from mplug.nn.parts import AttentionParts, Part, parts_of, with_parts
from mplug.nn.pipeline import Arrival, Pipeline, Produce, Rows, pipeline_named
from mplug.nn.product import Boundary, Narrow, Product
from mplug.nn.prologue import FusedProduct, Inputs, Projected, Prologue
from mplug.nn.random import Dropout, Jitter
from mplug.nn.router import Choice, Router
from mplug.nn.scores import RouterScore
from mplug.nn.sink import Operand, Sink, Weights, add_product, add_rows, aligned, zero_if_stale
from mplug.nn.specification import AttentionInputs, AttentionSpec, StaticKeys
from mplug.nn.static_cache import static_keys
from mplug.nn.statistics import add_auxiliary, count, count_in_backward, in_backward, keep_max, keep_max_in_backward

__all__ = [
    "ADAPTERS",
    "MLP",
    "NORMAL_TAIL",
    "NORMAL_TAIL_END",
    "NORMAL_TAIL_SLOPE",
    "Activation",
    "ActivationFunction",
    "Arrival",
    "Attention",
    "AttentionInputs",
    "AttentionParts",
    "AttentionSpec",
    "Block",
    "Boundary",
    "Cache",
    "CacheSize",
    "Choice",
    "Decoder",
    "DenseBlock",
    "DepthAhead",
    "Description",
    "DotProductAttention",
    "Dropout",
    "Embedding",
    "Entries",
    "Experts",
    "FusedProduct",
    "Fusible",
    "GatheredForm",
    "Gemm",
    "GroupedProduct",
    "Head",
    "Inits",
    "Inputs",
    "Jitter",
    "LatentAttention",
    "Linear",
    "Loss",
    "MixtureOfExperts",
    "Narrow",
    "Norm",
    "NormFunction",
    "Operand",
    "PackedHeads",
    "Part",
    "Pipeline",
    "Produce",
    "Product",
    "Projected",
    "Prologue",
    "Route",
    "Router",
    "RouterScore",
    "Rows",
    "Sink",
    "SparseBlock",
    "StaticKeys",
    "TokenEmbedding",
    "TokensAhead",
    "Weights",
    "add_auxiliary",
    "add_product",
    "add_rows",
    "aligned",
    "boundary_of",
    "count",
    "count_in_backward",
    "decoder_plan",
    "describe",
    "fake",
    "flops_of",
    "fusible_norm",
    "grouped_linear",
    "in_backward",
    "keep_max",
    "keep_max_in_backward",
    "normed",
    "operator",
    "packed_heads_of",
    "parts_of",
    "passing_through",
    "pipeline_named",
    "scaled_dot_product",
    "states",
    "static_keys",
    "weight_gradient",
    "weights_per_token",
    "with_packed_heads",
    "with_parts",
    "within_capacity",
    "zero_if_stale",
]
