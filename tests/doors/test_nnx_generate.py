"""The README's first change: tunix's Sampler before, this library's loop after, the same texts."""

from flax_readme import diff_block
from generate_cases import ToyTokenizer
from lifting import lifted
from tunix_models import MAX_CONTEXT, SIZES, VOCAB, tunix_model

BLOCK = diff_block("nnx generate")
PROMPTS = ["defdefghij", "defdefgxyz", "defde", "q"]  # id 0 is padding to tunix
CACHE_SIZES = {name: SIZES[name] for name in ("num_layers", "num_kv_heads", "head_dim")}


class WithMethods:
    """The same tokenizer as tunix wants one: special ids are methods."""

    def __init__(self, tokenizer):
        self.encode, self.decode = tokenizer.encode, tokenizer.decode

    def bos_id(self):
        return 2

    def eos_id(self):
        return 1

    def pad_id(self):
        return 0


def texts(block, tokenizer):
    names = {"model": tunix_model("qwen3"), "prompts": PROMPTS, "tokenizer": tokenizer}
    names["cache_sizes"] = CACHE_SIZES | {"cache_size": MAX_CONTEXT}
    exec(compile(block, "README.md", "exec"), names)
    return names["texts"]


def test_the_texts_are_the_same():
    tokenizer = ToyTokenizer(VOCAB, bos_id=2)
    with lifted():
        before = texts(BLOCK.before, WithMethods(tokenizer))
    after = texts(BLOCK.after, tokenizer)
    assert after == before and len(set(after)) == len(PROMPTS)
    assert all(len(text) == 8 for text in after)
