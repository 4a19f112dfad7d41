"""This attention inside decoders that others wrote in Flax; see README.md here."""

from codec_jax.flax.carrier import Carrier as Carrier
from codec_jax.flax.decoder import ForeignDecoder as ForeignDecoder
