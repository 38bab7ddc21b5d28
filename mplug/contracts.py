"""The types that plugins and the host exchange. Torch-free: tensors appear in annotations only.

Shapes: `B` samples of a micro batch, `S` sequence length. A micro batch is a mapping from entry names to tensors; the
plan's `context` names the entries.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from mplug.errors import quoted

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from mplug.layout.placement import Placement
    from mplug.layout.plan import Parameter, Stages

MicroBatch = Mapping[str, "Tensor"]
IGNORED = -100
"""The label of a position that has no target."""
DOCUMENTS = "document_lengths"
"""The entry of a packed micro batch with the lengths of each sample's documents [B, M]."""

LOSS_WEIGHTS = "loss_weights"
"""The entry of a micro batch with the factors of the losses of its labels [B, S]."""


@dataclass(frozen=True, eq=False)
class RankBatch(Mapping[str, "Tensor"]):
    """A rank's part of a micro batch on the device, as the host's feed hands it to a stepper.

    `number` is that of the micro batch in the step, from 0 on. `is_last` says that the step ends with it. `positions`
    and `targets` are the numbers of labels, and of labels that are not ignored, in the whole micro batch. A micro batch
    without labels has no `targets`; labels that a loader keeps on a device are counted there. `rows` are the number of
    rows of each stream, and the sum of the squared lengths of their segments, by the entry with these lengths.
    """

    entries: MicroBatch
    number: int
    is_last: bool
    positions: int
    targets: "int | Tensor | None"
    rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> "Tensor":
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


STREAMS = "streams"
"""In the answer of `batch_entries`: all entries that the processor of the model makes."""


WHOLE_SEQUENCE = "whole_sequence"
"""The axis of entries along the tokens of a sample that no strategy divides: every rank has them of all tokens."""
RETURNS = "returns"
"""The entry of a micro batch by which rows of streams return to the rank whose tokens refer to them.

It maps the named axis of each stream to the way of its rows. The host makes it if ranks balance streams
(`parallel.balance`); a unit that joins rows of a stream with tokens names it in `Unit.optional`.
"""


@dataclass(frozen=True)
class Medium:
    """Something beside text in a sample (a picture, a recording), as a `Processor` has prepared it.

    `tokens` stand for it in the text: its placeholders, and the special tokens around them. `rows` is the number of
    rows that it has in a stream, and `values` is what the processor makes them from. `mark` are the tokens that a
    published chat template writes for it, whatever its size; `tokens` take their place. Empty: no template writes it.
    A processor has no tokenizer: `texts` are texts among the tokens, each with the index of the token behind it. A
    plugin that writes a medium into a text encodes them (`written`).
    """

    tokens: tuple[int, ...]
    rows: int
    values: Any
    mark: tuple[int, ...] = ()
    texts: tuple[tuple[int, str], ...] = ()

    def written(self, encode: Callable[[str], Sequence[int]]) -> "Medium":
        """The medium with its texts as tokens. `encode` adds no special tokens."""
        found, begin = list[int](), 0
        for index, text in self.texts:
            found += [*self.tokens[begin:index], *encode(text)]
            begin = index
        return replace(self, tokens=(*found, *self.tokens[begin:]), texts=())


@dataclass(frozen=True, eq=False)
class Seen:
    """A medium in a micro batch, as the model receives it: after resizing and rounding.

    `positions` are those of its placeholders in the sample. `content` has the form that `Processor.prepare` takes.
    """

    positions: tuple[int, ...]
    content: "Tensor"


class Processor(Protocol):
    """Makes the entries of a model's streams from the media of samples. Its module imports without torch.

    `entries` are the names of what it makes; every micro batch has all of them. `placeholders` are the tokens that
    stand for rows of a stream. They occur nowhere else, and are never targets.

    Optional: `prepare_video(content, rate, encode)` prepares the frames [F, H, W, 3] of a video as `prepare` does those
    of a picture. `rate` is the number of frames in a second. `encode` gives the tokens of a text, for models that read
    times as text between the frames. A processor without this method takes no videos.

    Optional: `contents_of(batch)` undoes what the processor did. It returns the media (`Seen`) of each sample of a
    micro batch, in their order, from the batch's entries alone. Commands that show samples use it. Frames with text
    between them are media of their own.
    """

    entries: tuple[str, ...]
    placeholders: frozenset[int]

    def prepare(self, content: "Tensor", num_pictures: int = 1) -> Medium:
        """Prepare a medium from its decoded content: the colours [F, H, W, 3] of F frames, as uint8.

        `num_pictures` is the number of media of one frame in the text that it belongs to (a sample before packing, a
        prompt): a family may show a single picture in more detail than each of several. Raises UsageError for content
        that the model cannot take (too long and thin, say).
        """

    def entries_of(
        self, tokens: "Tensor", media: "Sequence[Sequence[Medium]]", document_lengths: "Tensor | None" = None
    ) -> "Mapping[str, Tensor]":
        """The entries of a micro batch with these tokens [B, S] and the media of each sample, in their order.

        A sample without media has an empty sequence. The lengths of documents [B, M] are those of packed samples; no
        medium crosses a border of documents. Raises ValueError, and names the sample by its index, if the placeholders
        in its tokens are not those of its media.

        What the entries say about a token does not depend on later tokens. So a command that samples calls this once,
        with any text in place of the tokens to come.
        """


Record = dict[str, Any]
"""A line of metrics.jsonl.

Always: step, loss, grad_norm, lr, tokens, targets_per_s, step_s, tokens_per_s, tflops, mfu, memory_gib, data_wait_s,
skipped. `tokens` are the targets of the run so far, and `targets_per_s` those of this step per second. `tokens_per_s`
and `tflops` count all positions of the samples, also those without a target (prompts, the unfilled rest of a sample).
`step_s` is the duration of the step in seconds, without evaluations and saves. In fp16: loss_scale, and overflows (the
number of steps lost to overflow so far). Statistics by name, if the model has some. Figures that the stepper adds:
`bubble` of a pipeline. If the model has streams, for the axis of each ('patches'):
`patches_per_s`, and `patches_imbalance`, the rows of the rank that computes the most of them over the mean of ranks.
val_loss, if the run was evaluated after the step.
"""


@dataclass(frozen=True)
class Mark:
    """A statement to the host about a field of a plugin's Config, in its annotation: `Annotated[int, MAY_CHANGE]`."""

    words: str


MAY_CHANGE = Mark("may change")
"""The field may differ when a run resumes: no loss, gradient or sample depends on it beyond rounding."""
MAY_MOVE = Mark("may change while the data stays the same")
"""The field of a data plugin may differ when a run resumes, provided that the loader's `fingerprint` is the same."""
OF_TRAINING = Mark("decides training only")
"""The field of an adapter plugin may differ in a new run that begins with adapters: they compute the same with it."""


def distinct(names: Sequence[Any] | None) -> Any:
    """The names of a list in a Config: ValueError if an entry occurs twice, because one of the two has no effect.

    For a field whose entries are names: `Annotated[tuple[str, ...], AfterValidator(distinct)]`.
    """
    for number, name in enumerate(names or ()):
        if name in (names or ())[:number]:
            raise ValueError(f"must have each name once, but has {quoted(name)} twice")
    return names


@dataclass(frozen=True)
class Variance:
    """A declaration that runs with this plugin differ from the run of one process by more than rounding.

    `reason` is a clause for `mplug explain`: 'gradients are rounded to bf16 before they are summed'. `tolerance` bounds
    the relative error of losses, gradients and norms in the tiny fp64 run of `mplug_testing`. The suites add it to
    their usual bound of 1e-10 for runs with the plugin.

    `sums` are the mesh axes over which the plugin itself sums gradients in this way, by listening to sinks. The host
    refuses a run in which any other part sums gradients over one of them. It is empty if the variance has another
    cause.
    """

    reason: str
    tolerance: float
    sums: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.reason:
            raise ValueError("a variance needs a reason")
        if not 0 < self.tolerance < 1:
            raise ValueError(f"the tolerance of a variance is between 0 and 1, not {self.tolerance}")


class Stateful(Protocol):
    """An object whose state a checkpoint holds. The state consists of tensors and plain data only."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in tensors, numbers, strings, lists and mappings."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state`, so that the object continues exactly from the point at which `state` was taken."""


class Loader(ABC):
    """The base class of loaders: one split of a data set, in one global order of samples.

    The order does not depend on the layout. The state (`Stateful`) is that of the global order, not of a rank: a
    checkpoint holds rank 0's state, and any number of ranks loads it. If each rank has state of its own (buffers,
    worker processes), the loader defines `merge_states`. Such a loader loads both a merged state and its own state. It
    raises UsageError for a state from which it cannot continue, before it reads data or changes anything.
    """

    vocab_size: int
    """Every token is less than this."""
    samples_per_epoch: int | None = None
    """For a finite set: this number of consecutive samples, from the first on, is the whole set."""
    tokenizer: Mapping[str, Any] | None = None
    """The record of the tokenizer that made the data (`TokenizerRecord.as_mapping`). The run's record keeps it."""
    fingerprint: str | None = None
    """A short text that is equal for equal samples, wherever their files are, and differs for others.

    Checkpoints hold it. A run whose data has another fingerprint does not resume.
    """
    merge_states: Callable[[list[dict[str, Any]]], dict[str, Any]] | None = None
    """Takes the states of all parts of the batch, in their order, and returns the one that a checkpoint holds."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state, as `Stateful.state_dict`."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, as `Stateful.load_state_dict`."""

    @abstractmethod
    def take(self, num_samples: int) -> Iterator[MicroBatch]:
        """Yield this rank's part of the next `num_samples` global samples, in micro batches of whole samples.

        Entries: `tokens` [B, S], `labels` [B, S] (already shifted; -100 for a position without a target), `positions`
        [1 or B, S] and `sample_ids` [B] (a sample's number in the global order). They are CPU tensors; the host moves
        them to the device. The host holds several micro batches at a time, so the loader must not reuse their memory
        for later ones.

        A loader that packs documents into samples declares this in the hook `batch_entries`, and adds
        `document_lengths` [B, M], int64: the lengths in the order of the documents in the sample. Each row sums to S
        and is padded with zeros; M is the same in every micro batch. The loader decides whether positions restart with
        each document.

        A loader whose targets differ in importance declares `loss_weights` [B, S] in the same way: floating-point
        numbers of at least 0, which multiply the losses of the labels. The loss of a step is the sum of these products
        over all ranks and micro batches, divided by the number of targets, whatever their weights are.

        If the model has streams (`mplug.Stream`), every micro batch has their entries, which the loader declares in
        `batch_entries` too: at least one group of rows, also where no sample has any.
        """


class Tokenizer(Protocol):
    """Converts text to tokens and back.

    If a tokenizer states its `vocab_size`, the host never decodes a token that is not less than it, however many tokens
    the model has. A tokenizer of conversations may state `end_tokens`, a frozenset of tokens that end an answer, and
    have `encode_chat`, as `FolderTokenizer` does: `mplug generate` then ends texts there, and takes --chat. A part that
    is no text becomes the token -1 if the template supports texts only.
    """

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without added special tokens.

        If the text spells a special token, that part is encoded as plain text.
        """

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, without special tokens; bytes that are not UTF-8 become U+FFFD."""


class CorpusTokenizer(Tokenizer, Protocol):
    """What a plugin of the kind `tokenizers` builds, fit for encoding whole corpora.

    Every encoding process builds one, and uses it from one thread at a time. A tokenizer with special tokens may state
    `special_tokens`, a mapping from their texts to their numbers. Code that writes such a text on purpose (chat
    templates) cuts it out of the text and inserts the number.
    """

    vocab_size: int
    """Every token is less than this, including `eod`."""
    eod: int | None
    """The token that ends a document and occurs in no text; None if the vocabulary has none."""

    def encode_batch(self, texts: Sequence[str]) -> "Sequence[Sequence[int] | NDArray[Any]]":
        """The tokens of each text, equal to those of `encode`.

        They are lists or one-dimensional integer arrays, whichever is faster. The method uses one CPU core only: the
        caller starts the number of processes that it wants.
        """


class FolderTokenizer(Protocol):
    """The tokenizer of a published model, read from its folder, for commands that read or write its text.

    A plugin of the kind `tokenizers` that reads such folders has a static method `read_folder(folder: Path)`, which
    returns this object. Its distribution names the file that it needs in the entry-point group
    'mplug.tokenizer_files': `"tokenizer.json" = "NAME"`, where NAME is the plugin's own entry point.
    """

    begin: tuple[int, str] | None
    """The number and the text of the token in front of a text; None if the folder names none."""
    end: tuple[int, str] | None
    """The number and the text of the token that ends a text; None if the folder names none."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text alone, without special tokens around it."""

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of a text to continue, with the special tokens that the folder's tokenizer adds to a text."""

    def encode_part(self, text: str) -> list[int]:
        """The tokens of a part of a text, without added special tokens."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a conversation and of the header of the next answer, by the folder's chat template.

        Each message has a `role` and a `content`: a text, or a list of parts. A part has a `type`: that of a text has
        the field `text`; for that of a medium, the template writes a mark (`Medium.mark`). Raises UsageError if the
        folder has no chat template, or if the template does not support the messages.
        """

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, without special tokens; bytes that are not UTF-8 become U+FFFD."""


@dataclass
class Piece:
    """What an optimizer updates: one parameter, or the part of it that this rank owns.

    The optimizer updates `master` (fp32) in place from `gradient` (same shape). The host has reduced the gradient, but
    not scaled it. The gradient is fp32; it has the weight's dtype only if the optimizer accepts that
    (`low_precision_gradients`). `weight` is the low-precision copy. The host writes it after the step, or the optimizer
    does (`one_pass`). It is None if the master is the weight itself.
    """

    name: str
    master: "Tensor"
    gradient: "Tensor"
    weight: "Tensor | None"
    parameter: "Parameter"
    placement: "Placement"


@dataclass(frozen=True)
class WeightExchange:
    """How other ranks, or other copies, get the weights that this rank has updated; in `Model.exchanges`.

    The host calls `begin` when pieces have new weights: after each update, and when it has initialised or loaded
    masters. `begin` may only start the exchange, which forward then hides: the units wait for the weights that they
    use. `wait` waits for all that is under way (on a GPU, lets the current stream wait). It is None if nothing is under
    way when `begin` returns.
    """

    begin: "Callable[[], None]"
    wait: "Callable[[], None] | None"


@dataclass(frozen=True)
class StepScalars:
    """The values that change from step to step, as fp32 scalars on the device, so that the CPU never waits for them.

    The optimizer must multiply gradients by `scale` (clipping and the token count). If `skip` is 1, no bit of masters,
    state or weights may change, whatever the values of the gradients and of the other scalars.
    """

    lr: "Tensor"
    scale: "Tensor"
    skip: "Tensor"
    weight_decay: "Tensor"


class Optimizer(ABC):
    """The base class of optimizers: updates pieces.

    Gradients belong to the optimizer, which may overwrite them; the next step writes them anew. By default `step` does
    not write weights: after it, the host rounds masters into weights, which is one more pass over memory.
    `mplug.TorchOptimizer` makes one from a fused optimizer of torch.
    """

    needs: Literal["elements", "matrices"]
    """Whether any range of a piece may be updated alone, or only whole matrices (segment by segment).

    If the optimizer needs whole matrices, the host refuses a layout that cuts one, before any process starts. To read
    this attribute, and to count bytes, the host builds the optimizer from tensors without memory. So building must not
    read values.
    """
    one_pass: bool = False
    """Whether `step` writes the weights itself.

    Afterwards each piece's `weight`, if it has one, is its master rounded to nearest. If `skip` is 1, `step` writes no
    weight.
    """
    low_precision_gradients: bool = False
    """Whether the host may pass a gradient that is a single product, never added to, rounded to the weight's dtype.

    This halves its memory.
    """

    @abstractmethod
    def step(self, scalars: StepScalars) -> None:
        """Update every piece's master once. The CPU must not wait for the device."""

    @abstractmethod
    def state(self, piece: Piece) -> "dict[str, Tensor]":
        """The live state tensors of a piece by name, scalars or of the piece's shape; loading copies into them."""


@dataclass
class StepResult:
    """The results of a step, on the device: reading one makes the CPU wait for the device."""

    loss: "Tensor"
    grad_norm: "Tensor"
    tokens: "Tensor"
    skipped: "Tensor"
    stop: "Tensor"
    """Greater than 0 if any rank has been asked to stop: all ranks then stop after the same step."""
    statistics: "Mapping[str, Tensor]" = field(default_factory=dict)
    """The statistics of the model's modules by buffer name, summed over all ranks and micro batches."""
    failed: "Tensor | None" = None
    """Greater than 0 if `trainer.nonfinite` decides what happens next. None: it decides after every skipped step."""
    figures: "Mapping[str, Tensor]" = field(default_factory=dict)
    """Further scalars for metrics.jsonl, by name."""
    rows: "Mapping[str, Tensor]" = field(default_factory=dict)
    """The sums over the step of `RankBatch.rows` [2], by the entry with the lengths."""
    measured: "Callable[[], Mapping[str, float]] | None" = None
    """Returns further figures by name; called on the CPU after the device has completed the step."""


class Relay(Protocol):
    """Runs the chunks of a model that is divided into stages forward, on all ranks of a pipeline together."""

    def __call__(
        self,
        entries: MicroBatch,
        compute: "Callable[[int, Mapping[str, Tensor]], Mapping[str, Tensor]]",
        result: "Tensor",
    ) -> "Tensor":
        """Run this rank's chunks, and return the result of the last chunk on every rank.

        `compute(chunk, values)` runs a chunk on the entries and the activations that enter it, and returns by name the
        activations that leave it. The last chunk returns one tensor instead, of the dtype and shape of `result`; the
        relay may receive it in `result`.
        """


@dataclass(frozen=True)
class Pipeline:
    """A model that is divided into stages, and how its ranks run: the answer of the hook `build_pipeline`.

    `stages` is pure data: the host keeps the units of this rank's chunks. `stepper(default)` returns the stepper that
    runs the chunks, around the host's default stepper (`DefaultStepper`); in a run that does not train, around an
    `Evaluator`, and only its method `evaluate` is called. `relay(crossing)` returns what runs the
    chunks forward in a run that does not train, on all ranks together. `crossing` names the activations that enter each
    chunk, which are those of the plan's inference units: they may differ from those of training. None: the strategy
    cannot run its stages forward, and the commands that would are refused.
    """

    stages: "Stages"
    stepper: "Callable[[Any], Stepper]"
    relay: "Callable[[Sequence[tuple[str, ...]]], Relay] | None"


class Stepper(Protocol):
    """Owns the training step: it turns micro batches into gradients, and gradients into an update."""

    def forward_backward(self, micro_batches: Iterable[RankBatch], step: int) -> None:
        """Sum the gradients of a step's micro batches into the sinks; sum losses and token counts as well."""

    def update(self, lr: float, weight_decay: float) -> StepResult:
        """Finish gradients, clip them, check that they are finite, and let the optimizer update its pieces."""

    def evaluate(self, micro_batches: Iterable[RankBatch]) -> "Tensor":
        """The mean loss over all tokens of the micro batches, without gradients or dropout.

        The stepper must take each micro batch only when it computes it next, and the same number on every rank. If the
        run is asked to stop, the host ends the sequence early, on all ranks after the same micro batch, and ignores the
        result.
        """
