"""The plan: what a model publishes about its units, parameters, buffers and FLOPs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mplug.errors import listed, suggest
from mplug.layout.names import compiled, within
from mplug.layout.widths import Widths
from mplug.layout.work import Flops, Work

TOKENS_AXIS = "sequence"
"""The named axis of the tokens of a sample."""
ENCODER_TEXTS = ("encoder_tokens", "encoder_places", "encoder_lengths", "encoder_rows")
"""The entries of micro batches with a text for an encoder beside the tokens of each sample.

A loader that has them answers `batch_entries` with these names, and makes them by
`mplug_tokenization.encoder_texts.entries_of_texts`. A family with an encoder and a decoder takes them.
"""


@dataclass(frozen=True)
class Unit:
    """A named submodule that runs as a whole. Pipelines split a model between units; recompute and compile wrap units.

    `name` is the submodule's fully qualified name, which a split does not change. `inputs` are the positional arguments
    of `method`: activations and batch entries. `outputs` are the activations that it returns (one value, or a tuple in
    this order). `optional` are entries that only some loaders supply: keyword arguments of `method` if they are there.
    `sequence` is the named axis along which the rows of the unit lie: that of the tokens, or of a stream of the plan.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    method: str = "forward"
    optional: tuple[str, ...] = ()
    sequence: str = TOKENS_AXIS


@dataclass(frozen=True)
class Stream:
    """Rows of another kind than tokens, such as the patches of pictures, which units of their own compute.

    The entries of a stream are [1, rows, ...]: all rows of a micro batch, one segment (a picture) after the other. The
    number of rows differs from micro batch to micro batch. It is never 0: a micro batch without a picture has one group
    of rows to which nothing else in it refers. So all ranks run the same units.

    `lengths` names the entries [1, N], int64, that state the lengths of segments, padded with zeros; each of them sums
    to the number of rows. A unit of the stream that takes one of them as an input attends within its segments. The
    first counts for units that take none; the segments of the others lie within its segments. A `group` are consecutive
    rows of a segment that a unit may join into one: all rows of a group are always on one rank. `indices` names the
    entries whose values are numbers of groups, or -1. A unit of tokens that takes one of them changes only tokens whose
    number is not -1: without such tokens, it may be left out.

    The host divides the segments among the ranks along axes that share streams (`Axis.shares_streams`). It appends
    copies of the last group of rows, as segments of their own, until all these ranks have equally many groups, of which
    each rank of sequence parallelism has as many, and at least two. Group g of the r-th rank, of n groups each, then
    has the number r n + g in the entries that `indices` names. `own` names entries [N, L] that the host makes, one for
    each entry of `indices` in order: the lines of that entry whose first group this rank has, with the numbers that
    groups have on this rank; at least one line, perhaps of -1 alone. A line refers to one segment.

    With `parallel.balance`, the host also divides the segments among ranks that read different samples. The results
    then return to the rank of their samples, where a unit joins them with tokens: the numbers in `indices` stay those
    of the loader. Such a unit takes the entry `mplug.RETURNS`.

    `rows` and `squares` are the rows of a sample, and the sum of the squared lengths of its segments. Estimates and the
    split into pipeline stages count by them, before there is data.

    `remedy` ends the error of a run whose loader has no such rows: what to change, after a semicolon.
    """

    lengths: tuple[str, ...]
    group: int = 1
    indices: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    rows: int = 0
    squares: int = 0
    remedy: str = "use a data plugin that supplies them (the hook 'batch_entries'), or a model without this part"


@dataclass(frozen=True)
class Answering:
    """How a model is sampled from whose prompts are texts of an encoder (`ENCODER_TEXTS`).

    The decoder's text begins with the token `start`. The inference units of the plan compute it together with the
    texts. `units` compute the tokens that follow, with what modules keep of the texts in their caches.
    """

    start: int
    units: tuple[Unit, ...]


@dataclass(frozen=True)
class Segment:
    """A range of a dimension: `count` items of `width` elements each, along one named axis.

    An item (a head with `width` = head_dim) is never cut. `uneven` applies if the ranks do not divide `count`:
    `refuse` is a UsageError, `pad` pads (a vocabulary), `copy` puts an item on several ranks (few KV heads).
    """

    axis: str
    count: int
    width: int = 1
    uneven: Literal["refuse", "pad", "copy"] = "refuse"

    @property
    def length(self) -> int:
        """Elements along the dimension."""
        return self.count * self.width


@dataclass(frozen=True)
class Init:
    """How initial values are made.

    - 'normal': with standard deviation `std`, or with one for each segment of a fused dimension (`segment_stds`).
    - 'constant': `value`.
    - 'uniform': between `low` and `high`.
    - 'log of uniform': the logarithm of a number that is uniform between `low` and `high`.
    - 'time step': x such that log(softplus(x)) is uniform between log(`low`) and log(`high`) (Mamba, arXiv 2312.00752,
      section 3.6).
    """

    kind: Literal["normal", "constant", "uniform", "log of uniform", "time step"]
    std: float = 0.0
    value: float = 0.0
    low: float = 0.0
    high: float = 0.0
    segment_stds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind in ("log of uniform", "time step") and not 0 < self.low <= self.high:
            raise ValueError(f"initial values of the kind '{self.kind}' need 0 < low <= high, not {self}")


def axes_of(dims: Iterable[str | Segment | tuple[Segment, ...]]) -> frozenset[str]:
    """The named axes of a tensor's dimensions."""
    parts = [dim if isinstance(dim, tuple) else (dim,) for dim in dims]
    return frozenset(part if isinstance(part, str) else part.axis for dim in parts for part in dim)


@dataclass(frozen=True)
class Parameter:
    """The meaning of a parameter's dimensions, its initial values, and how it is trained.

    `dims` has one entry per dimension: a named axis, one segment, or several segments if weights are fused (QKV has
    three). `over` are the activation axes that the parameter is broadcast over: its gradient is partial over exactly
    the mesh axes that divide them. `decay` says whether weight decay applies; by default it applies to parameters with
    at least two dimensions. A parameter that is not `trainable` is frozen: it has values, a placement and a place in
    checkpoints, but no gradient, master or optimizer state. `widths` compares its matrix with that of a narrower model
    whose learning rates the run uses; None: there is no such model.
    """

    dims: tuple[str | Segment | tuple[Segment, ...], ...]
    init: Init
    over: tuple[str, ...] = ("batch", "sequence")
    decay: bool | None = None
    trainable: bool = True
    widths: Widths | None = None

    @property
    def axes(self) -> frozenset[str]:
        """The named axes of all dimensions."""
        return axes_of(self.dims)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies."""
        return len(self.dims) >= 2 if self.decay is None else self.decay


@dataclass(frozen=True)
class Buffer:
    """The meaning of a buffer's dimensions. Every element starts as `value`.

    With empty `over` it is a state: equal on all ranks that hold the same part, and saved in checkpoints. Otherwise it
    is a statistic of a step, whose `reduction` is a sum or a maximum. At the start of a step the host sets it to zero
    (a maximum to `value`). Each rank adds what it sees of the axes `over`, or keeps the maximum of it, in forward and
    in backward. At the end the host replaces it by the sum or maximum over all ranks and micro batches, and calls the
    module's method `step_ended` if it has one. Metrics report a statistic that is `reported` (under this name, if it
    is a text, and else under that of the buffer), divided by the step's number of targets if `per_target` is set, and
    by its number of tokens (all positions of the global batch, with or without a target) if `per_token` is set.
    """

    dims: tuple[str | Segment | tuple[Segment, ...], ...]
    value: float = 0.0
    over: tuple[str, ...] = ()
    per_target: bool = False
    per_token: bool = False
    reduction: Literal["sum", "max"] = "sum"
    reported: bool | str = True

    def __post_init__(self) -> None:
        if self.reduction not in ("sum", "max"):
            raise ValueError(f"the reduction of a buffer is 'sum' or 'max', not {self.reduction!r}")
        if self.per_target and self.per_token:
            raise ValueError("a statistic is divided by the number of targets or by that of tokens, not by both")
        if self.reduction == "max" and (self.per_target or self.per_token or not self.over):
            raise ValueError(
                "a buffer with reduction 'max' is a statistic: it needs `over`, and no `per_target` or `per_token`"
            )

    @property
    def axes(self) -> frozenset[str]:
        """The named axes of all dimensions."""
        return axes_of(self.dims)

    @property
    def is_statistic(self) -> bool:
        """Whether the buffer is a statistic, which every step counts from zero."""
        return bool(self.over)


@dataclass(frozen=True)
class Shift:
    """A batch entry that the host makes from another: position i has the value of position i + `by` of `entry`.

    Positions whose source is behind the end of the sequence, or in another document, have the value `fill`. The host
    shifts whole sequences, before a strategy divides them.
    """

    entry: str
    by: int
    fill: int


@dataclass(frozen=True)
class Plan:
    """The data that a model publishes about itself.

    `units` run in order. `inference` are the units that end in `logits` instead of a loss. `parameters` map patterns
    of fully qualified names ('*' matches one dotted component) to the meaning of their dimensions. `context` names the
    axes of every batch entry, `activations` those of every activation that travels between units. `tied` are groups of
    names of the same parameter; the pattern of the first name describes it. `buffers` map patterns to the modules'
    buffers, except those that the host fills. `mixing` maps patterns of modules to the named axes that these modules
    and their submodules mix; use it for classes of other packages, which cannot declare it (`mixes`). `frozen` are
    patterns of parameters and modules that are not trained, even if `parameters` says otherwise; the host adds the
    patterns of the config (`model.frozen`). `base_modules` are patterns of modules that keep the formats of a
    precision if its recipe computes products in others (a product whose result must be in fp32). The first and the
    last unit of a row of blocks, and all units outside of a row, are base modules in any case. `external` (a
    `mplug_pretrained.ExternalNames`) says which tensors of published checkpoints hold which parameters; None: the model
    has no published form. `parts` says the
    same of folders that hold a part of the model alone, by the name of the part: of the section of the family's Config
    that describes it. `shifted` are entries that the host makes from those of the loader; `context` names their axes
    too. `recalled` are entries that the host computes before a step, each with the activation of the last unit (of the
    shape of labels) whose values it has under the weights with which the run began. `count` returns the number by
    which the sums of losses of a whole micro batch are divided; None: its targets. `work` says what the FLOPs belong
    to: which parameter, or which module. If it is None, the host collects it from what the modules state
    (`plan_work`). `streams` are the rows of other kinds than tokens, by their named axis. `flops` are those of the
    units of the tokens; the FLOPs of a stream are the sum of the work of its units. `answering` is how the model
    samples if its prompts are texts of an encoder.
    """

    units: tuple[Unit, ...]
    parameters: Mapping[str, Parameter]
    context: Mapping[str, tuple[str, ...]]
    activations: Mapping[str, tuple[str, ...]]
    flops: Flops
    inference: tuple[Unit, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    buffers: Mapping[str, Buffer] = field(default_factory=dict)
    mixing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    base_modules: tuple[str, ...] = ()
    external: Any = None
    parts: Mapping[str, Any] = field(default_factory=dict)
    shifted: Mapping[str, Shift] = field(default_factory=dict)
    recalled: Mapping[str, str] = field(default_factory=dict)
    count: Callable[[Mapping[str, Any]], Any] | None = None
    work: tuple[Work, ...] | None = None
    streams: Mapping[str, Stream] = field(default_factory=dict)
    answering: Answering | None = None

    def __post_init__(self) -> None:
        for unit in self.units:
            if unit.sequence != TOKENS_AXIS and unit.sequence not in self.streams:
                raise ValueError(
                    f"the unit '{unit.name}' computes rows along '{unit.sequence}', and the plan has no such stream"
                    f"{suggest(unit.sequence, self.streams)}"
                )

    @property
    def results(self) -> tuple[str, ...]:
        """The activations that the unit with the loss returns."""
        return next(unit.outputs for unit in reversed(self.units) if "loss" in unit.outputs)

    @property
    def stream_entries(self) -> frozenset[str]:
        """The entries of micro batches that belong to streams: an axis of each is that of a stream, or its lengths."""
        return frozenset[str]().union(*(self.entries_of(axis) for axis in self.streams))

    @property
    def named_axes(self) -> frozenset[str]:
        """Every named axis of entries, activations, parameters and buffers."""
        flowing = [axis for axes in (*self.context.values(), *self.activations.values()) for axis in axes]
        of_tensors = [axis for one in self.parameters.values() for axis in one.axes]
        return frozenset((*flowing, *of_tensors, *(axis for one in self.buffers.values() for axis in one.axes)))

    def entries_of(self, axis: str) -> frozenset[str]:
        """The entries of micro batches that belong to the stream with this axis."""
        return frozenset((*self.streams[axis].lengths, *(one for one, axes in self.context.items() if axis in axes)))

    def without_streams(self, units: Iterable[Unit]) -> tuple[Unit, ...]:
        """The units, of `units`, that compute tokens of text: no unit of a stream, and none that joins one to tokens.

        With them, tokens to which no row of a stream belongs need no entries of streams.
        """
        if self.answering is not None:
            return self.answering.units
        indices = {name for stream in self.streams.values() for name in stream.indices}
        return tuple(
            unit
            for unit in units
            if unit.sequence == TOKENS_AXIS and indices.isdisjoint((*unit.inputs, *unit.optional))
        )

    def lengths_of(self, unit: Unit) -> str:
        """The entry with the lengths of the segments that a unit of a stream works in; empty for a unit of tokens."""
        if unit.sequence == TOKENS_AXIS:
            return ""
        lengths = self.streams[unit.sequence].lengths
        return next((name for name in (*unit.inputs, *unit.optional) if name in lengths), lengths[0])

    def match_buffers(self, names: Iterable[str]) -> dict[str, Buffer]:
        """Each matched buffer's entry; ValueError if a pattern matches no buffer, or two match the same buffer."""
        regexes = {pattern: compiled(pattern) for pattern in self.buffers}
        hits = [(name, pattern) for name in names for pattern, regex in regexes.items() if regex.fullmatch(name)]
        found = {name: self.buffers[pattern] for name, pattern in hits}
        if len(found) < len(hits):
            raise ValueError(f"two patterns of the plan's buffers describe one of {listed(sorted(found))}")
        if unused := set(regexes) - {pattern for _, pattern in hits}:
            raise ValueError(f"no buffer matches the plan's pattern '{min(unused)}'")
        return found

    def match(self, names: Iterable[str]) -> dict[str, Parameter]:
        """Each parameter's entry; ValueError if not exactly one pattern matches a name, or a pattern matches none."""
        regexes = {pattern: compiled(pattern) for pattern in self.parameters}
        unused, found = set(regexes), dict[str, Parameter]()
        for name in names:
            hits = [pattern for pattern, regex in regexes.items() if regex.fullmatch(name)]
            if not hits:
                raise ValueError(f"no pattern of the plan describes parameter '{name}'{suggest(name, regexes)}")
            if len(hits) > 1:
                raise ValueError(f"patterns {listed(hits)} of the plan both describe parameter '{name}'")
            unused.discard(hits[0])
            found[name] = self.parameters[hits[0]]
        if unused:
            tied = next((names for names in self.tied if set(names[1:]) & unused), None)
            if tied is not None:
                raise ValueError(
                    f"{listed(tied)} are one parameter, which the pattern of the first describes; keep that"
                )
            raise ValueError(f"no parameter matches the plan's pattern '{min(unused)}'")
        frozen = self._frozen_among(found)
        return {name: replace(one, trainable=False) if name in frozen else one for name, one in found.items()}

    def names_of(self, name: str) -> tuple[str, ...]:
        """All names of a parameter: the group that contains `name` if it is tied, else `name` alone."""
        return next((names for names in self.tied if name in names), (name,))

    def _frozen_among(self, names: Iterable[str]) -> set[str]:
        """The parameters that a pattern of `frozen` matches; a tied parameter matches by any of its names."""
        aliases = [(name, alias) for name in names for alias in self.names_of(name)]
        hits = {pattern: {n for n, alias in aliases if within(pattern).fullmatch(alias)} for pattern in self.frozen}
        if unused := [pattern for pattern, found in hits.items() if not found]:
            raise ValueError(f"no parameter or module matches the pattern '{unused[0]}' that the plan freezes")
        return set().union(*hits.values())
