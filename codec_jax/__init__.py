"""Exact attention for decoding batches whose requests share prefixes.

From top to bottom: `generate` (prompts in, completions out), the decoders, `attend` (the seam), the
planner, the forest. Take the floor you need; nothing lower knows anything higher.
"""

from codec_jax.attention import attend as attend
from codec_jax.attention_hydragen import hydragen_attention as hydragen_attention
from codec_jax.forest import Forest as Forest
from codec_jax.forest_arrays import ForestArrays as ForestArrays
from codec_jax.forest_arrays import ForestCapacity as ForestCapacity
from codec_jax.forest_arrays import export_arrays as export_arrays
from codec_jax.forest_drawing import draw_forest as draw_forest
from codec_jax.generate import Completion as Completion
from codec_jax.generate import Generation as Generation
from codec_jax.generate import generate as generate
from codec_jax.generate_batch import Options as Options
from codec_jax.kv_cache import KVCache as KVCache
from codec_jax.kv_cache import KVPool as KVPool
from codec_jax.kv_cache import fill_cache as fill_cache
from codec_jax.models import load_model as load_model
from codec_jax.pages import OutOfPagesError as OutOfPagesError
from codec_jax.partial import Partial as Partial
from codec_jax.partial import merge as merge
from codec_jax.partial import merge_stacked as merge_stacked
from codec_jax.planning.build import build_plan as build_plan
from codec_jax.planning.explain import explain_plan as explain_plan
from codec_jax.planning.plan import Plan as Plan
from codec_jax.planning.spec import PlanSpec as PlanSpec
from codec_jax.sampling import Sampling as Sampling
