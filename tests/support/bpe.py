"""A byte-pair tokenizer of Hugging Face's `tokenizers`, trained on the shipped prose: no file is fetched."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from smelt_interp.data.text import corpus

TEXT = corpus("prose", "train").documents[0].data.decode()


def byte_level_bpe(vocab_size: int = 1000) -> Tokenizer:
    """As GPT-2's, with a token that ends documents and no BOS; runs of brackets and newlines are merged on purpose."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT, "Output: } )\nInput: ( [ ) { } ) ]\n" * 50, "([]{:})\n" * 50], trainer)
    return tokenizer
