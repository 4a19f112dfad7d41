"""What the tests inside foreign decoders run under: strict for our code, lifted for theirs."""

import pytest
from lifting import inside, lifted, strict

from codec_jax.flax import Carrier, ForeignDecoder


@pytest.fixture(autouse=True)
def foreign_code_is_lifted(monkeypatch):
    """Decoders run lifted; the attention that they call in there is strict again."""
    monkeypatch.setattr(Carrier, "attend", inside(strict, Carrier.attend))
    for door in ForeignDecoder.__subclasses__():
        for name in ("run", "head"):
            monkeypatch.setattr(door, name, inside(lifted, getattr(door, name)))
