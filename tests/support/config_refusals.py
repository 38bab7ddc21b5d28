"""Why mplug refuses config.json files that transformers reads: the rules that the generated refusals are listed by."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """A kind of refusal.

    `pattern` is searched in 'model_type: reason'. `computable` is set if the library ignores what is refused, in some
    configs at least, or if our blocks could compute the model: it says why a family refuses it nevertheless.
    """

    what: str
    pattern: str
    computable: str = ""


RULES = (
    Rule(
        "a field that the family's table does not have",
        "unknown to the family",
        "another release of the library may compute something else with it, and nothing tells the two apart",
    ),
    Rule(
        "an option that a scaling of rotary positions does not have",
        "unknown for rotary positions of the type|unknown; it has the blocks' types",
        "the library ignores it with a warning; another release may not",
    ),
    Rule(
        "a scaling of rotary positions without an implementation (dynamic, longrope, proportional)",
        "rope_type' is '",
        "the library computes plain positions up to a length, or with these factors, and others beyond it",
    ),
    Rule(
        "two fields that contradict each other",
        "contradict each other|are one, but have the values|has two types|without which the library ignores it",
        "the library ignores one of them; which one depends on the release",
    ),
    Rule(
        "a tied head in a family whose published models have none",
        "(mixtral|gpt_oss|deepseek_v[23]): .*'tie_word_embeddings' is true",
        "our blocks could compute it; none is published",
    ),
    Rule(
        "another activation",
        "'(hidden_act|hidden_activation|activation_function)' is",
        "the library ignores the field for gpt-oss; our blocks could compute others in a Mixtral; none is published",
    ),
    Rule(
        "dropout of attention weights",
        "'attention_dropout' is",
        "it has no effect on the logits, but on training, and these families have none",
    ),
    Rule(
        "a value that the library ignores",
        "the library ignores|the library never|the library has no such field",
        "the author of the folder meant something with it, and another release may compute it",
    ),
    Rule(
        "a DeepSeek with a field of another version or of its first release",
        "deepseek_v[23]: .*'(mlp_bias|topk_method|moe_layer_freq|scoring_func)' is",
        "the library ignores it, always or without experts; the code that came with such a folder computes it",
    ),
    Rule(
        "another scale of attention in a GPT-2",
        "gpt2: .*'(scale_attn_weights|scale_attn_by_inverse_layer_idx)' is",
        "a single block, or heads of width 1, have the same scale",
    ),
    Rule(
        "another bound of gpt-oss' activation",
        "gpt_oss: .*'(swiglu_limit|swiglu_alpha)' is",
        "values within both bounds are the same",
    ),
    Rule(
        "a model of another kind",
        "'(is_encoder_decoder|add_cross_attention|per_layer_config|use_bidirectional_attention)' is",
        "the library ignores it in a decoder, or in some decoders",
    ),
    Rule(
        "scaled rotary positions in a family, or in blocks, whose published models have none",
        "it scales (its|the) rotary positions",
        "a factor of 1 changes nothing; our blocks could compute the scalings",
    ),
    Rule(
        "llama3's frequencies with bounds in the wrong order",
        "high_freq_factor that is not above low_freq_factor",
        "the library computes with them, as if no or every frequency lay between; a published folder has them in order",
    ),
    Rule(
        "types of blocks that the family does not have",
        "'layer_types' is",
        "older names of the types (attention), and types of blocks that the library does not look at",
    ),
    Rule(
        "windows in a Mixtral",
        "mixtral: .*'sliding_window' is",
        "a window as long as the sequence changes nothing; our blocks could compute windows, and none is published",
    ),
    Rule(
        "widths of heads that do not divide the width of the model",
        "does not divide hidden_size",
        "latent attention has widths of its own; every published model divides",
    ),
    Rule(
        "groups of a single expert",
        "leaves a group fewer than 2 experts",
        "the library fails with them; in a config whose blocks are all dense, it does not look",
    ),
    Rule("windows without a length, or lengths without a window", "but it has no window"),
    Rule("windows that releases of the library place differently", "'max_window_layers' is not 0"),
    Rule("a value that the family does not compute", "supports .* only"),
    Rule(
        "a value that the field cannot have",
        "must be |is not a ",
        "the library does not look at it in this config",
    ),
    Rule(
        "a size without which there is no model",
        "it lacks the field",
        "the library does not look at it in this config",
    ),
    Rule(
        "sizes that fit no model",
        "describes no model",
        "the library does not look at them in this config",
    ),
)
"""The first rule that matches counts."""


def rule_of(kind: str, reason: str) -> Rule | None:
    """The rule for a refusal of a `model_type`."""
    return next((rule for rule in RULES if re.search(rule.pattern, f"{kind}: {reason}")), None)
