"""Sizes of real models, to be filled with random weights for measurements.

Those of the checkpoints' own config.json files: CodeLlama (Hydragen's models), Llama 3.1, Qwen3
(CoDec's end-to-end model) and Yi with 200K tokens (Hydragen's long document).
"""

from codec_jax.models.config import ModelConfig
from codec_jax.models.rope_scaling import Llama3Rope

_LLAMA_3_1_ROPE = Llama3Rope(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=8192
)

PRESETS: dict[str, ModelConfig] = {
    "random-4l-128": ModelConfig(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=2816,
        num_layers=4,
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=128,
        max_context=4096,
        dtype="bfloat16",
    ),
    "random-codellama-7b": ModelConfig(
        vocab_size=32016,
        hidden_size=4096,
        intermediate_size=11008,
        num_layers=32,
        num_q_heads=32,
        num_kv_heads=32,
        head_dim=128,
        max_context=16384,
        rope_theta=1e6,
        dtype="bfloat16",
    ),
    "random-codellama-13b": ModelConfig(
        vocab_size=32016,
        hidden_size=5120,
        intermediate_size=13824,
        num_layers=40,
        num_q_heads=40,
        num_kv_heads=40,
        head_dim=128,
        max_context=16384,
        rope_theta=1e6,
        dtype="bfloat16",
    ),
    "random-codellama-34b": ModelConfig(
        vocab_size=32000,
        hidden_size=8192,
        intermediate_size=22016,
        num_layers=48,
        num_q_heads=64,
        num_kv_heads=8,
        head_dim=128,
        max_context=16384,
        rope_theta=1e6,
        dtype="bfloat16",
    ),
    "random-llama-3.1-8b": ModelConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_context=131072,
        rope_theta=5e5,
        rope_scaling=_LLAMA_3_1_ROPE,
        dtype="bfloat16",
    ),
    "random-qwen3-4b": ModelConfig(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_layers=36,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_context=40960,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_embeddings=True,
        qk_norm=True,
        dtype="bfloat16",
    ),
    "random-yi-6b-200k": ModelConfig(
        vocab_size=64000,
        hidden_size=4096,
        intermediate_size=11008,
        num_layers=32,
        num_q_heads=32,
        num_kv_heads=4,
        head_dim=128,
        max_context=200000,
        rope_theta=1e7,
        dtype="bfloat16",
    ),
}
