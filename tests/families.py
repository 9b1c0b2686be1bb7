"""Tiny random language models of many families: 2 layers, width 32, vocabulary 90, dropout 0."""

from typing import Any

LLAMA = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 4}  # shorter than the documents of a test
GPT2 = {
    **{"vocab_size": 90, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "use_cache": False},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
}
FALCON = {key: value for key, value in LLAMA.items() if key not in ("head_dim", "intermediate_size")}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
CAUSAL = {
    "Llama": LLAMA,
    "Qwen2": {**LLAMA, "tie_word_embeddings": True},
    "Qwen3": LLAMA,
    "Mistral": {**LLAMA, **WINDOW},
    "Gemma": LLAMA,
    "Gemma3": {**LLAMA, **WINDOW},
    "Phi": {**LLAMA, "partial_rotary_factor": 0.5},
    "Phi3": LLAMA,
    "GPT2": GPT2,
    "GPTNeoX": {**FALCON, **NO_DROPOUT, "intermediate_size": 64},
    "Falcon": {**FALCON, **NO_DROPOUT},
    "StableLm": LLAMA,
    "Mixtral": {**LLAMA, "num_local_experts": 2, "num_experts_per_tok": 1},
}
# Logits that the model changes after its output layer.
CHANGED = {"Gemma2": LLAMA, "Cohere": LLAMA, "Granite": {**LLAMA, "logits_scaling": 2.0}}
# Families whose documents see each other when they are packed.
LEAKING = {
    "OPT": {**FALCON, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    "Bloom": {**FALCON, "n_head": 4},
}
BERT = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
MASKED = {
    "Bert": BERT,
    "Roberta": {**BERT, "pad_token_id": 1},
    "DistilBert": {
        **{"vocab_size": 90, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64},
        **{"dropout": 0.0, "attention_dropout": 0.0},
    },
    "ModernBert": {
        **{name: value for name, value in BERT.items() if "dropout" not in name},
        **{"local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
        **{"bos_token_id": 1, "eos_token_id": 2},
    },
}


def config(family: str, **changes: Any) -> Any:
    """The tiny config of a family."""
    import transformers

    settings = {**{**CAUSAL, **CHANGED, **LEAKING, **MASKED}[family], **changes}
    name = {"Gemma3": "Gemma3Text"}.get(family, family)
    return getattr(transformers, f"{name}Config")(**settings)


def make(family: str, spread: float = 0.2, **changes: Any) -> Any:
    """A model of a family, in evaluation mode; a wide spread of its weights makes tokens matter to each other."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    suffix = "ForMaskedLM" if family in MASKED else "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, family + suffix)(config(family, **changes)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=spread)
    return model
