"""The task encoder of conversations with pictures and videos.

`S` sequence length, `M` documents of a packed sample, `n` tokens of a conversation.
"""

from pathlib import Path

import torch
from megatron.energon import Cooker, CrudeSample, DefaultTaskEncoder, basic_sample_keys, stateless
from megatron.energon.edataclass import edataclass
from megatron.energon.flavors.base_dataset import Sample
from torch import Tensor

from mplug import IGNORED
from mplug_energon.config import EnergonConfig
from mplug_energon.faults import Unusable
from mplug_energon.media import Files, Preparation, prepare_media
from mplug_energon.messages import INVALID, read_conversation
from mplug_energon.packing import Size, pack
from mplug_energon.writing import Writer, Written
from mplug_streams import Medium, Processor
from mplug_tokenization.templates import Template
from mplug_tokenization.vocabulary import Vocabulary

TOO_LARGE, TOO_LONG, NO_ANSWER = "a picture that is too large", "a text that is too long", "no answer"
WEIGHT = "a weight without data.sample_weights"
UNBOUNDED = 1 << 62


@edataclass
class Raw(Sample):
    """The files of a sample."""

    files: Files


@edataclass
class Talk(Sample):
    """A conversation: tokens [n], labels [n], its media in order, and the weight of its losses."""

    tokens: Tensor
    labels: Tensor
    media: tuple[Medium, ...]
    weight: float

    @property
    def size(self) -> Size:
        """Its tokens, and the rows of its media."""
        return Size(len(self.tokens), sum(medium.rows for medium in self.media))


@edataclass
class Filled(Sample):
    """A sample: tokens [S], labels [S], weights of losses [S], positions [S] and its media in order."""

    tokens: Tensor
    labels: Tensor
    loss_weights: Tensor
    positions: Tensor
    media: tuple[Medium, ...]


@edataclass
class Packed(Filled):
    """A sample of several conversations with their lengths [M]; the unfilled end is one more document."""

    document_lengths: Tensor


@stateless
def cook(crude: CrudeSample) -> Raw:
    """The files of a sample of an untyped data set."""
    folders = [source.dataset_path for source in crude["__sources__"]]
    folder = Path(str(folders[0].local_path())) if folders and folders[0].is_local() else None
    own = {name: content for name, content in crude.items() if isinstance(content, bytes)}
    return Raw(**basic_sample_keys(crude), files=Files(crude["__key__"], own, folder))


class Conversations(DefaultTaskEncoder):
    """Encodes a conversation per sample: its messages by the chat template, its pictures by the model's processor.

    With `data.packing_buffer_size`, conversations share samples. Without it, each has a sample of its own.
    """

    cookers = (Cooker(cook),)
    decoder = None

    def __init__(
        self, config: EnergonConfig, template: Template, vocabulary: Vocabulary, processor: Processor, seq_length: int
    ) -> None:
        super().__init__()
        self.config, self.seq_length = config, seq_length
        self.text = Writer(template, vocabulary, processor)
        self.media = Preparation(processor, vocabulary.encode, config.max_pixels, config.video_fps)
        self.vocab_size = self.text.vocab_size
        self.budget = Size(seq_length, UNBOUNDED if config.max_rows is None else config.max_rows)
        eod = vocabulary.tokenizer.eod
        unused = (token for token in (eod, *range(self.vocab_size)) if token not in processor.placeholders)
        self.filler = next(token for token in unused if token is not None)

    @stateless
    def encode_sample(self, sample: Sample) -> Talk | Filled:
        """The tokens, labels and media of a conversation. Raises Unusable if it cannot be used."""
        if not isinstance(sample, Raw):
            raise Unusable(
                f"it is a {type(sample).__name__}; prepare data sets of conversations with --sample-type "
                f"CrudeWebdataset",
                INVALID,
            )
        if "json" not in sample.files.own:
            raise Unusable(f"it has no file '.json' (but {', '.join(sample.files.own) or 'none'})", INVALID)
        conversation = read_conversation(sample.files.own["json"], self.config.picture_mark)
        if conversation.weight != 1 and not self.config.sample_weights:
            raise Unusable(
                f"it has the weight {conversation.weight:g}, and data.sample_weights is false; set it to true, or "
                f"remove the weight",
                WEIGHT,
            )
        media = prepare_media(conversation, sample.files, self.media)
        written = self._cut(self.text.write(conversation, media))
        tokens, labels = written.labelled()
        talk = Talk.derive_from(
            sample, tokens=tokens, labels=labels, media=tuple(written.media), weight=conversation.weight
        )
        return talk if self.config.packing_buffer_size is not None else self._filled(talk)

    def select_samples_to_pack(self, samples: list[Talk]) -> list[list[Talk]]:
        """The conversations of each sample."""
        packed = pack([talk.size for talk in samples], self.budget, self.config.max_documents - 1)
        return [[samples[number] for number in members] for members in packed]

    @stateless
    def pack_selected_samples(self, samples: list[Talk]) -> Packed:
        """One sample of these conversations; positions start again in each."""
        lengths = [len(talk.tokens) for talk in samples]
        lengths += [self.seq_length - sum(lengths)] if sum(lengths) < self.seq_length else []
        spread = torch.zeros(self.config.max_documents, dtype=torch.int64)
        spread[: len(lengths)] = torch.tensor(lengths)
        return Packed.derive_from(
            samples[0],
            tokens=self._padded([talk.tokens for talk in samples], self.filler),
            labels=self._padded([talk.labels for talk in samples], IGNORED),
            loss_weights=self._weights(samples),
            positions=torch.cat([torch.arange(length) for length in lengths]),
            media=tuple(medium for talk in samples for medium in talk.media),
            document_lengths=spread,
        )

    def _filled(self, talk: Talk) -> Filled:
        return Filled.derive_from(
            talk,
            tokens=self._padded([talk.tokens], self.filler),
            labels=self._padded([talk.labels], IGNORED),
            loss_weights=self._weights([talk]),
            positions=torch.arange(self.seq_length),
            media=talk.media,
        )

    def _weights(self, talks: list[Talk]) -> Tensor:
        return self._padded([torch.full((len(talk.tokens),), talk.weight) for talk in talks], 1)

    def _padded(self, rows: list[Tensor], value: int) -> Tensor:
        row = torch.cat(rows)
        return torch.cat((row, row.new_full((self.seq_length - len(row),), value)))

    def _cut(self, written: Written) -> Written:
        """A conversation within the budget: its beginning, before the first medium that is not within it."""
        budget, config = self.budget, self.config
        limits = f"trainer.seq_length={budget.tokens}, data.max_rows={config.max_rows}"
        for medium in written.media:
            if len(medium.tokens) > budget.tokens or medium.rows > budget.rows:
                size = f"{len(medium.tokens)} tokens and {medium.rows} rows"
                raise Unusable(f"a picture of {size} is larger than a sample ({limits})", TOO_LARGE)
        kept, length = written.media_within(budget)
        is_whole = kept == len(written.media) and len(written.tokens) <= budget.tokens + 1
        has_answer = any(written.answers[1 : length + 1])
        if is_whole and not has_answer:
            raise Unusable("it has no answer, a message of the role 'assistant'", NO_ANSWER)
        if not is_whole and (config.too_long == "refuse" or not has_answer):
            reason = "" if has_answer else ", and no answer begins within a sample"
            rows = sum(medium.rows for medium in written.media)
            raise Unusable(f"it has {len(written.tokens)} tokens and {rows} rows{reason} ({limits})", TOO_LONG)
        return Written(written.tokens, written.answers, written.begins[:kept], written.media[:kept], length)
