"""What all trainings of this story have in common: a small Llama, and sentences of a made-up language."""

import torch

LAYERS, HIDDEN, HEADS, GROUPS, FFN, VOCABULARY, LENGTH = 4, 64, 4, 2, 96, 128, 24
EPSILON, RATE = 1e-6, 0.01
STEPS, SENTENCES = 30, 8
# The same model for transformers.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "intermediate_size": FFN,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": EPSILON,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}


def sentences(step: int) -> torch.Tensor:
    """Return the tokens of one step: a word is always followed by the same one, so that there is something to learn."""
    first = torch.randint(VOCABULARY, (SENTENCES, 1), generator=torch.Generator().manual_seed(step))
    return (first + 5 * torch.arange(LENGTH + 1)) % VOCABULARY
