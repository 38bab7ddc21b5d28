"""The class of a language model of lm-evaluation-harness, on an engine of mplug."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from mplug import UsageError
from mplug_lm_eval.engine import Engine, Scores, Texts
from mplug_sampling import Sampling

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

DEFAULT_TOKENS = 256
"""Tokens of a text if its task does not say, as in the harness's own backends."""
GENERATION = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}
"""The options of generation that a task may set."""


class MplugLM(TemplateLM):  # type: ignore[misc]  # the library has no types
    """Requests of tasks are encoded here, and computed by all ranks of the engine.

    Texts and scores are those of the harness's backend for Hugging Face models: contexts are cut on the left, the first
    token of a text without a context follows the prefix token, and texts end before the first stop word.
    """

    def __init__(self, engine: Engine, seed: int) -> None:
        super().__init__()
        self.engine, self.tokens, self.seed = engine, engine.tokens, seed

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return min(self.tokens.ends) if self.tokens.ends else self.tokens.prefix

    @property
    def prefix_token_id(self) -> int:
        """The token in front of a text without a context."""
        return self.tokens.prefix

    @property
    def max_length(self) -> int:
        """The most tokens that the model reads."""
        return self.engine.length

    @property
    def tokenizer_name(self) -> str:
        """A name for caches of requests, which the command does not use."""
        return "mplug"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text; by default with special tokens, unless it begins with the text of one."""
        begins = bool(self.tokens.prefix_text) and string.startswith(self.tokens.prefix_text)
        alone = begins if add_special_tokens is None else not add_special_tokens
        return self.tokens.alone(string) if alone else self.tokens.prompt(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        texts, numbers = list[list[int]](), list[int]()
        for _words, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise UsageError(
                    f"an answer of the tasks has {len(continuation)} tokens, and the model reads 1 to "
                    f"{self.max_length}; leave the task out"
                )
            texts.append((context + continuation)[-(self.max_length + 1) :])
            numbers.append(len(continuation))
        found = [tuple(one) for one in self.engine.scores(Scores(texts, numbers))]
        for (words, _, _), answer in zip(requests, found, strict=True):
            if words is not None:
                self.cache_hook.add_partial("loglikelihood", words, answer)
        return found

    def loglikelihood_rolling(self, requests: "Sequence[Instance]", disable_tqdm: bool = False) -> list[float]:
        """The log-likelihoods of whole texts: every token is predicted once, with as much context as fits."""
        windows, counts = list[tuple[Any, list[int], list[int]]](), list[int]()
        for (text,) in (request.args for request in requests):
            found = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [(None, *make_disjoint_window(window)) for window in found]
            windows += own
            counts.append(len(own))
        values = iter(self._loglikelihood_tokens(windows))
        return [sum(next(values)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: "Sequence[Instance]", disable_tqdm: bool = False) -> list[str]:
        """The texts that follow contexts, each until a stop word, an end token, or its number of tokens."""
        groups = dict[str, list[int]]()
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        found = dict[int, str]()
        for numbers in groups.values():
            options = requests[numbers[0]].args[1]
            found |= zip(numbers, self._texts([requests[one].args[0] for one in numbers], options), strict=True)
        return [found[number] for number in range(len(requests))]

    def _texts(self, contexts: Sequence[str], options: Mapping[str, Any]) -> list[str]:
        options = normalize_gen_kwargs(options, DEFAULT_TOKENS)
        if unknown := sorted(set(options) - GENERATION):
            raise UsageError(
                f"a task generates with the option '{unknown[0]}', which mplug does not support; leave it out"
            )
        room = self.max_length - options["max_gen_toks"]
        if room < 1:
            raise UsageError(
                f"a task generates {options['max_gen_toks']} tokens, and the model reads {self.max_length}; set a "
                f"smaller number: --gen-kwargs max_gen_toks=N"
            )
        stops = tuple(dict.fromkeys(stop for stop in (*options["until"], self.tokens.end_text) if stop))
        prompts = [self.tok_encode(context)[-room:] for context in contexts]
        request = Texts(prompts, options["max_gen_toks"], _sampling(options, self.seed), stops)
        return [_cut(self._decoded(tokens), stops) for tokens in self.engine.texts(request)]

    def _decoded(self, tokens: Sequence[int]) -> str:
        return self.tokens.decode([token for token in tokens if token not in self.tokens.ends])


def _sampling(options: Mapping[str, Any], seed: int) -> Sampling:
    """How tokens are drawn: the most probable one, unless a task samples."""
    if not options["do_sample"]:
        return Sampling(temperature=0, seed=seed)
    temperature, top_k, top_p = options.get("temperature", 1.0), options.get("top_k") or 0, options.get("top_p", 1.0)
    return Sampling(float(temperature), int(top_k), float(top_p), seed)


def _cut(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop word."""
    return text[: min((at for at in map(text.find, stops) if at >= 0), default=len(text))]
