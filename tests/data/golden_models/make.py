"""Makes the golden checkpoints of this folder: tiny random models and the logits of `transformers`.

An implementation that shares nothing with this one: `transformers` on the CPU build of PyTorch, in
an environment of its own (Python 3.11; never part of this project's):

    python3.11 -m venv new && new/bin/pip install torch==2.13.0+cpu transformers==5.24.0
    python3.11 -m venv old && old/bin/pip install transformers==4.57.6 numpy
    new/bin/python make.py models    # model.safetensors, config.json, golden.safetensors
    old/bin/python make.py configs   # config_v4.json: the same, spelled as in transformers 4

Weights are normal, norms are 1 + 0.3 normal, biases 0.3 normal, all rounded to the stored dtype.
`golden.safetensors` holds for two prompts, whose first 23 tokens are the same, `ids_N` (30 and 27
prompt tokens, then 12 of greedy decoding) and `logits_N` at every position, computed in float32.
"""

import json
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
VOCAB, PROMPT_LENS, NUM_SHARED, NUM_NEW, MIN_MARGIN = 64, (30, 27), 23, 12, 0.02
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
YARN_ALL = YARN | {
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "mscale": 0.8,
    "mscale_all_dim": 0.5,
    "truncate": False,
}
# name: (class, stored dtype, rope theta, rope scaling, other settings)
CASES = {
    "llama2": ("Llama", "bfloat16", 5e3, None, {"num_key_value_heads": 4}),
    "codellama": ("Llama", "float16", 1e6, None, {"num_key_value_heads": 4}),
    "llama-bias": ("Llama", "bfloat16", 3e3, None, {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", "bfloat16", 2e3, {"rope_type": "linear", "factor": 2.5}, {}),
    "llama3": ("Llama", "bfloat16", 5e5, LLAMA3, {}),
    "llama-yarn": ("Llama", "bfloat16", 2e3, YARN_ALL, {}),
    "smollm2": (
        "Llama",
        "float32",
        1e5,
        None,
        {
            "num_attention_heads": 6,
            "intermediate_size": 24,
            "tie_word_embeddings": True,
        },
    ),
    "yi": (
        "Llama",
        "bfloat16",
        5e6,
        None,
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 6},
    ),
    "mistral": ("Mistral", "bfloat16", 4e3, None, {"head_dim": 16, "sliding_window": None}),
    "qwen2": ("Qwen2", "bfloat16", 1e6, None, {}),
    "qwen2.5-yarn": ("Qwen2", "bfloat16", 7e3, YARN, {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", "bfloat16", 6e3, None, {"head_dim": 16, "tie_word_embeddings": True}),
}


def settings(name, *, old):
    """Arguments of the config class, as this generation of `transformers` spells them."""
    _, dtype, theta, scaling, other = CASES[name]
    if old:
        rope = {"rope_theta": theta, "rope_scaling": scaling and dict(scaling)}
    else:
        rope = {"rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": theta}}
    return BASE | other | rope | {"dtype": dtype}


def config_of(name, *, old):
    """The configuration object of a case."""
    import transformers

    config = getattr(transformers, CASES[name][0] + "Config")(**settings(name, old=old))
    config.architectures = [CASES[name][0] + "ForCausalLM"]
    return config


def random_model(name, seed):
    """The model in float32, its weights rounded to the stored dtype."""
    import torch
    import transformers

    torch.manual_seed(seed)
    kind = getattr(transformers, CASES[name][0] + "ForCausalLM")
    config = config_of(name, old=False)
    config._attn_implementation = "eager"
    model = kind(config).to(torch.float32).eval()
    for key, weight in model.named_parameters():
        normal = torch.randn(weight.shape)
        if weight.ndim == 1:
            value = 0.3 * normal + (1 if "norm" in key else 0)
        else:
            value = 1.3 * normal * 48**-0.5
        weight.data = value.to(getattr(torch, CASES[name][1])).to(torch.float32)
    return model


def continue_greedily(model, prompt):
    """Token ids, logits at every position, and the smallest margin of a choice."""
    import torch

    ids, margin = list(prompt), float("inf")
    for _ in range(NUM_NEW):
        last = model(torch.tensor([ids])).logits[0, -1]
        best = last.topk(2).values
        margin = min(margin, float(best[0] - best[1]))
        ids.append(int(last.argmax()))
    return ids, model(torch.tensor([ids])).logits[0], margin


def golden(model):
    """Tensors of `golden.safetensors`, and the smallest margin."""
    import torch

    shared, *rests = (torch.randint(3, VOCAB, (n,)).tolist() for n in (NUM_SHARED, 9, 9))
    tensors, margins = {}, []
    for index, (rest, length) in enumerate(zip(rests, PROMPT_LENS, strict=True)):
        ids, logits, margin = continue_greedily(model, [*shared, *rest][:length])
        tensors[f"ids_{index}"] = torch.tensor(ids, dtype=torch.int32)
        tensors[f"logits_{index}"] = logits.to(torch.float32).contiguous()
        margins.append(margin)
        if 2 in ids[length:]:
            margins.append(0.0)  # a stop token would end the row
    return tensors, min(margins)


def make_model(name):
    """Writes a case; the first seed whose greedy choices are clear is taken."""
    import torch
    from safetensors.torch import save_file

    for seed in range(100):
        model = random_model(name, seed)
        tensors, margin = golden(model)
        if margin > MIN_MARGIN:
            break
    folder = FOLDER / name
    model.to(getattr(torch, CASES[name][1])).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    save_file(tensors, folder / "golden.safetensors")
    for path in folder.iterdir():
        path.chmod(0o644)
    sys.stderr.write(f"{name}: seed {seed}, smallest margin {margin:.3f}\n")


def main(what):
    """Writes the part `what` of every case."""
    for name in CASES:
        if what == "models":
            import torch

            with torch.no_grad():
                make_model(name)
        else:
            config = config_of(name, old=True).to_diff_dict()
            config["torch_dtype"] = config.pop("dtype")  # its name before transformers 4.56
            text = json.dumps(config, indent=2, sort_keys=True) + "\n"
            (FOLDER / name / "config_v4.json").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1])
