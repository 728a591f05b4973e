"""The config of a Kestrel model."""

from transformers import PretrainedConfig


class KestrelConfig(PretrainedConfig):
    model_type = "kestrel"

    def __init__(
        self,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=128,
        max_position_embeddings=64,
        norm_eps=1e-6,
        **kwargs,
    ):
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.norm_eps = norm_eps
        super().__init__(**kwargs)
