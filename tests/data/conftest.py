"""A small byte-level BPE tokenizer with merges, special tokens and a chat template of choice."""

import pytest
from chat_templates import CHATML, SPECIAL_TOKENS, MakeTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "Hi there. How are you today?\n\nI am well, thank you.\n\nassistant\nuser\nsystem\n",
    "def add(a, b):\n    return a + b\n\n\nWhat is two plus two? Two plus two is four.\n",
    "You are a helpful assistant. Hello! Bye. The answer is: yes, and no.\n\n\n",
] * 8
ENDS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="session")
def backend() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    return tokenizer.to_str()


@pytest.fixture(scope="session")
def make_tokenizer(backend: str) -> MakeTokenizer:
    def make(
        template: str | None = CHATML, *, trim_offsets: bool = True
    ) -> PreTrainedTokenizerFast:
        built = Tokenizer.from_str(backend)
        built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        built.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
        made = PreTrainedTokenizerFast(
            tokenizer_object=built, name_or_path="test-tokenizer", **ENDS
        )
        made.chat_template = template
        return made

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: MakeTokenizer) -> PreTrainedTokenizerFast:
    return make_tokenizer()
