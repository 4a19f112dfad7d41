"""Host memory of loading a GGUF file: that of the parameters, and little more."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf_files import model_fields, tensor_shapes, tokenizer_fields, write_gguf

HIDDEN, INTERMEDIATE, VOCAB, LAYERS = 1024, 4096, 8192, 8
SIZES = {
    "block_count": LAYERS,
    "embedding_length": HIDDEN,
    "feed_forward_length": INTERMEDIATE,
    "attention.head_count": 16,
    "attention.head_count_kv": 16,
}
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18}  # of 32 numbers

LOAD = """
import sys
from pathlib import Path
from codec_jax.models import load_gguf
from codec_jax.models.memory import weights_bytes
load_gguf(Path(sys.argv[2]))  # what JAX itself needs
def in_status(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if key in line) * 1024
open("/proc/self/clear_refs", "w").write("5")  # the peak so far
before = in_status("VmRSS")
decoder = load_gguf(Path(sys.argv[1])).decoder
print(in_status("VmHWM") - before, weights_bytes(decoder.config))
"""


def stored_zeros(kind: str, shape: tuple[int, ...]):
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return kind, np.zeros((*shape[:-1], shape[-1] // 32 * BLOCK_BYTES[kind]), np.uint8)


def write_zeros(path: Path, kind: str) -> Path:
    """A decoder of 143 million parameters."""
    tokens = [*tokenizer_fields()["tokenizer.ggml.tokens"]]
    tokens += [f"unused {index}" for index in range(VOCAB - len(tokens))]
    vocabulary = tokenizer_fields(tokens=tokens, token_type=None)
    sizes = {96: HIDDEN, 32: HIDDEN, 64: INTERMEDIATE, 263: VOCAB}
    tensors = {}
    for name, shape in tensor_shapes().items():
        tensor = stored_zeros(kind, tuple(sizes[size] for size in shape))
        layers = range(LAYERS) if name.startswith("blk.0.") else [None]
        if not name.startswith(("blk.1.", "output.")):  # the head is tied
            tensors |= {name.replace("blk.0.", f"blk.{layer}."): tensor for layer in layers}
    return write_gguf(path, model_fields("llama", **SIZES) | vocabulary, tensors)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize("kind", BLOCK_BYTES)
def test_peak_host_memory_is_that_of_the_parameters_and_little_more(tmp_path, kind):
    """On a CPU the parameters (bfloat16) are host memory too: 1.3 times them at most."""
    small = write_gguf(
        tmp_path / "small.gguf",
        model_fields() | tokenizer_fields(),
        {name: np.ones(shape, np.float32) for name, shape in tensor_shapes().items()},
    )
    ran = subprocess.run(
        [sys.executable, "-c", LOAD, str(write_zeros(tmp_path / "large.gguf", kind)), str(small)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    peak_bytes, weights_bytes = map(int, ran.stdout.split())
    assert weights_bytes > 280e6
    assert 0.9 * weights_bytes < peak_bytes < 1.3 * weights_bytes
