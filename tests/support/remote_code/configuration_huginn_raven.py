"""A stand-in for the config that Huginn's checkpoints bring."""

from transformers import PretrainedConfig


class RavenConfig(PretrainedConfig):
    model_type = "huginn_raven"
    attribute_map = {"num_attention_heads": "n_heads", "hidden_size": "n_embd", "num_hidden_layers": "n_layers"}  # noqa: RUF012  # as theirs

    def __init__(self, n_embd=32, n_heads=4, n_layers=4, n_layers_in_prelude=1, n_layers_in_recurrent_block=2,
                 n_layers_in_coda=1, mean_recurrence=3, block_size=64, intermediate_size=48, vocab_size=259,
                 **values):  # fmt: skip
        self.n_embd, self.n_heads, self.n_layers = n_embd, n_heads, n_layers
        self.n_layers_in_prelude, self.n_layers_in_coda = n_layers_in_prelude, n_layers_in_coda
        self.n_layers_in_recurrent_block, self.mean_recurrence = n_layers_in_recurrent_block, mean_recurrence
        self.block_size, self.intermediate_size, self.vocab_size = block_size, intermediate_size, vocab_size
        self.num_key_value_heads, self.head_dim = n_heads, n_embd // n_heads
        super().__init__(**values)
