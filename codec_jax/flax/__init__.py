"""This attention inside decoders that others wrote in Flax; see README.md here."""

from codec_jax.attention_layer import StepView as StepView
from codec_jax.attention_layer import step_attention as step_attention
from codec_jax.flax.carrier import Carrier as Carrier
from codec_jax.flax.decoder import ForeignDecoder as ForeignDecoder
from codec_jax.flax.gemma import GEMMA_HOOK as GEMMA_HOOK
from codec_jax.flax.gemma_decoder import gemma_decoder as gemma_decoder
from codec_jax.flax.linen_attention import LinenHook as LinenHook
from codec_jax.flax.linen_attention import linen_attending as linen_attending
from codec_jax.flax.linen_decoder import LinenDecoder as LinenDecoder
from codec_jax.flax.nnx_attention import Shared as Shared
from codec_jax.flax.nnx_attention import SharedPool as SharedPool
from codec_jax.flax.nnx_attention import attending as attending
from codec_jax.flax.nnx_decoder import NNXDecoder as NNXDecoder
from codec_jax.flax.tunix_decoder import tunix_decoder as tunix_decoder
