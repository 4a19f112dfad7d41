# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From prompts to text
#
# Four prompts share prefixes. Plain decoding reads the shared keys and values once for every
# prompt; here each is read once for all of them, and the answers stay exact. This notebook walks
# down the house: prompts, forest, plan, partial attention and its merge by hand, the same through
# the library, and text.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import codec_jax as cj

model = cj.load_model("stories260k")
beginning = "Once upon a time, there was a little girl named Lily. One day, she"
prompts = [
    beginning + " saw a dog",
    beginning + " saw a cat",
    beginning + " went home",
    "One day, Tom",
]

# %% [markdown]
# ## The forest
#
# A node owns a run of tokens; a request is a path from a root. What several requests share is one
# node, and its keys and values lie in one set of pages.

# %%
token_lists = [model.tokenizer.encode(prompt) for prompt in prompts]
forest = cj.Forest.from_token_lists(token_lists, page_size=8)
print(cj.draw_forest(forest, decode=model.tokenizer.decode))

# %% [markdown]
# ## The plan
#
# The planner turns the forest into a few integer arrays: which page is read for which query rows
# (steps), which steps follow each other with one accumulator (segments), and which worker runs
# them.
# A page that four requests share stands in one step, with the rows of all four.

# %%
group_size, num_kv_heads, head_dim = 2, 4, 8
arrays = cj.export_arrays(forest)
spec = cj.PlanSpec(
    num_kv_heads=num_kv_heads, group_size=group_size, page_size=forest.page_size, num_workers=8
)
plan = cj.build_plan(arrays, spec)

num_steps = int(plan.counts.steps)
row_lo, row_hi = np.asarray(plan.steps.row_lo), np.asarray(plan.steps.row_hi)
node = np.asarray(plan.steps.node)
figure, axes = plt.subplots(figsize=(8, 2.5))
for step in range(num_steps):
    height = row_hi[step] - row_lo[step]
    colour = plt.get_cmap("tab10")(node[step] % 10)
    axes.broken_barh([(step, 0.9)], (row_lo[step], height), color=colour)
axes.set(xlabel="step (one page each)", ylabel="query row", title="One read for all its sharers")
axes.set_ylim(len(prompts) * group_size, 0)
plt.show()

# %% [markdown]
# ## Partial attention and merge, by hand
#
# Attention over a subset of the keys gives an output and the log-sum-exp of its scores. Two partial
# results merge into the result over both subsets (Hydragen, equation 5), so the shared part can be
# computed for all requests at once.

# %%
rng = np.random.default_rng(0)
num_q_heads = num_kv_heads * group_size
shape = (forest.unique_tokens, num_kv_heads, head_dim)
k, v = rng.standard_normal((2, *shape), np.float32)
q = rng.standard_normal((len(prompts), num_q_heads, head_dim), np.float32)


def partial_attention(query, keys, values):
    """One KV head: queries [rows, head_dim] over keys [tokens, head_dim]."""
    scores = jnp.matmul(query, keys.T, precision="highest") / head_dim**0.5
    lse = jnp.log(jnp.exp(scores).sum(axis=1))
    weights = jnp.exp(scores - lse[:, None])
    return cj.Partial(jnp.matmul(weights, values, precision="highest"), lse)


order = np.repeat(np.arange(arrays.kv_len.size), arrays.kv_len)  # node of each token
leaf = int(arrays.request_node[list(arrays.request_row).index(0)])  # where prompt 0 ends
path = [leaf]
while arrays.parent[path[-1]] >= 0:
    path.append(int(arrays.parent[path[-1]]))

rows = q[0, :group_size]  # prompt 0, KV head 0
by_hand = cj.Partial.empty((group_size,), head_dim)
for place in path:
    mine = order == place
    by_hand = cj.merge(by_hand, partial_attention(rows, k[mine, 0], v[mine, 0]))
print("log-sum-exp of prompt 0, KV head 0:", by_hand.lse)

# %% [markdown]
# ## The same through the library
#
# `attend` takes the queries, the pages and the plan. It never sees the prompts.

# %%
kv = cj.fill_cache(arrays, k, v, page_size=forest.page_size)
attention = cj.attend(q, kv, plan)
difference = float(jnp.abs(attention.out[0, :group_size] - by_hand.out).max())
print(f"largest difference from the hand-made result: {difference:.1e}")
assert difference < 1e-5

# %% [markdown]
# ## Text
#
# The decoder gets this attention injected; prefill computes each shared token once, and the decode
# loop plans anew every few steps while the private leaves grow.

# %%
sampling = cj.Sampling(num_samples=2, max_new_tokens=40, temperature=0.8, seed=1)
run = cj.Generation(model, prompts, sampling=sampling, options=cj.Options(page_size=8))
statistics = run.statistics
print(
    f"{statistics.unique_kv_tokens} prompt tokens in the pool instead of"
    f" {statistics.total_kv_tokens}"
)
for completion in run.finish():
    print(f"\n[{completion.prompt_index}.{completion.sample_index}]", completion.text.strip())
