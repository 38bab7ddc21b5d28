"""Rows that every config.json shares: fields of all models of the transformers library that change no decoder."""

from mplug_nn.public_form import PublicField
from mplug_nn.public_rows import FixedField, UnusedField


def unused(because: str, names: str) -> dict[str, PublicField]:
    """Rows for fields without effect, by their names in one text."""
    return {name: UnusedField(because) for name in names.split()}


_ABOUT_THE_FILE = {
    **unused(
        "it describes the file",
        "transformers_version architectures model_type _name_or_path name_or_path _commit_hash task_specific_params",
    ),
    **unused("mplug runs no code of a folder", "auto_map"),
    **unused("the type of the stored weights, which the tensors state themselves", "dtype torch_dtype"),
    **unused("the decoder of quantised weights reads it", "quantization_config"),
    **unused("the tokenizer's own files decide", "tokenizer_class"),
}
_TOKENS = {
    **unused(
        "generation and data use the number of this token, and no layer does; the library, but not mplug, leaves the "
        "embedding of the padding token untrained",
        "bos_token_id eos_token_id pad_token_id",
    ),
    **unused(
        "no decoder uses the number of this token",
        "sep_token_id unk_token_id cls_token_id mask_token_id decoder_start_token_id",
    ),
}
_GENERATION = unused(
    "a setting of generation",
    """
    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens cache_implementation
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff
    eta_cutoff exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length
    max_new_tokens min_length no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups
    num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate
    suppress_tokens target_lookbehind temperature top_k top_p typical_p use_cache
    """,
)
_RUNNING = {
    **unused(
        "what a call returns, not how it is computed",
        "output_hidden_states output_attentions output_past return_dict keys_to_ignore_at_inference "
        "tie_last_hidden_states",
    ),
    **unused(
        "how the library runs the same computation",
        "_attn_implementation attn_implementation _attn_implementation_autoset _experts_implementation "
        "experts_implementation torchscript use_bfloat16 gradient_checkpointing tf_legacy_loss chunk_size_feed_forward",
    ),
}
_OTHER_TASKS = {
    **unused("a field of classifiers", "id2label label2id num_labels problem_type finetuning_task classifier_dropout"),
    **unused("a field of models with an encoder", "is_decoder tie_encoder_decoder prefix"),
}
_OTHER_MODELS: dict[str, PublicField] = {
    "is_encoder_decoder": FixedField(False, (False,)),
    "add_cross_attention": FixedField(False, (False,)),
    "cross_attention_hidden_size": FixedField(None, (None,)),
    "pruned_heads": FixedField(None, (None, {})),
    "per_layer_config": FixedField(None, (None, {})),
}
SHARED_FIELDS: dict[str, PublicField] = {
    **_ABOUT_THE_FILE,
    **_TOKENS,
    **_GENERATION,
    **_RUNNING,
    **_OTHER_TASKS,
    **_OTHER_MODELS,
}
"""Rows for `PublicForm.fields`: what every config.json may have."""
