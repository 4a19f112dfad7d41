"""The interceptor on a Linen attention class: it runs whatever flax has traced before."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import linen_model
import numpy as np
import pytest
from flax import linen as nn
from linen_model import HOOK, Attention, Model, causal, own_keys

from codec_jax.flax import LinenHook, linen_attending

IDS, POSITIONS = linen_model.tokens()


@functools.cache
def variables_of(model):
    """The same for models that differ in `salt` only."""
    if model.salt:
        return variables_of(model.copy(salt=""))
    return jax.jit(model.init)(jax.random.key(0), IDS, POSITIONS)


def plain(model, variables):
    return model.apply(variables, IDS, POSITIONS)[0]


def hooked(model, variables, attention=causal, *, hook=HOOK, num_layers=2):
    """Scores of the model with this attention, jitted; checks that the pool came through."""

    @jax.jit
    def run(variables, pool):
        context = linen_attending(attention, pool, hook=hook, num_layers=num_layers)
        with context as carrier:
            logits, _ = model.apply(variables, IDS, POSITIONS)
        return logits, carrier.pool

    logits, pool = run(variables, jnp.int32(10))
    assert pool == 10 + num_layers
    return logits


def assert_same(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)


def differ(got, want):
    return np.abs(np.asarray(got) - np.asarray(want)).max() > 0.1


def test_the_trap_is_there():
    """Why the context does more than `nn.intercept_methods`: flax's cache knows no interceptors."""
    model, ran = Model(salt="trap"), []
    variables = variables_of(model)

    def intercept(call, args, kwargs, context):
        ran.append(type(context.module))
        return call(*args, **kwargs)

    plain(model, variables)
    with nn.intercept_methods(intercept):
        plain(model, variables)
    assert ran and Attention not in ran


def test_plain_then_hooked_then_plain():
    model = Model(salt="plain first")
    variables = variables_of(model)
    want = plain(model, variables)
    assert_same(hooked(model, variables), want)
    assert differ(hooked(model, variables, own_keys), want)
    np.testing.assert_array_equal(plain(model, variables), want)


def test_hooked_then_plain():
    variables = variables_of(Model())
    model = Model(salt="hooked first")
    strange = hooked(model, variables, own_keys)
    assert differ(strange, plain(model, variables))
    np.testing.assert_array_equal(plain(model, variables), plain(Model(), variables))


def test_two_hooks_one_after_the_other():
    model = Model(salt="two hooks")
    variables = variables_of(model)
    first = hooked(model, variables, own_keys)
    assert_same(hooked(model, variables, causal), plain(model, variables))
    np.testing.assert_array_equal(hooked(model, variables, own_keys), first)


def test_a_hook_inside_another_never_runs_and_says_so():
    model = Model()
    variables = variables_of(model)
    outer = linen_attending(causal, 0, hook=HOOK, num_layers=2)
    inner = linen_attending(causal, 0, hook=HOOK, num_layers=2)
    with outer, pytest.raises(RuntimeError, match=r"2 layers, in order; it ran for \[\]"), inner:
        model.apply(variables, IDS, POSITIONS)


@pytest.mark.parametrize("foreign_first", [True, False])
def test_interceptors_of_others_work_with_it(foreign_first):
    """As gemma's LoRA does: another interceptor changes what the projections return."""
    model = Model(salt=f"others {foreign_first}")
    variables = variables_of(model)

    def larger(call, args, kwargs, context):
        result = call(*args, **kwargs)
        return 1.5 * result if isinstance(context.module, nn.DenseGeneral) else result

    def run(*contexts):
        with jax.disable_jit(), contexts[0], contexts[1]:
            return model.apply(variables, IDS, POSITIONS)[0]

    others = nn.intercept_methods(larger)
    ours = linen_attending(causal, 0, hook=HOOK, num_layers=2)
    got = run(*((others, ours) if foreign_first else (ours, others)))
    want = run(nn.intercept_methods(larger), contextlib.nullcontext())
    assert_same(got, want)
    assert differ(got, plain(model, variables))


def test_without_a_jit_around_it():
    model = Model(salt="eager")
    variables = variables_of(model)
    with linen_attending(causal, 0, hook=HOOK, num_layers=2) as carrier:
        got, _ = model.apply(variables, IDS, POSITIONS)
    assert carrier.pool == 2
    assert_same(got, plain(model, variables))


def test_a_class_by_its_name():
    model = Model(salt="by name")
    variables = variables_of(model)
    hook = LinenHook("linen_model.Attention", linen_model.forward)
    assert_same(hooked(model, variables, hook=hook), plain(model, variables))


def test_an_error_inside_leaves_nothing_hooked():
    model = Model(salt="error")
    variables = variables_of(model)

    def broken(*_):
        raise ArithmeticError("mine")

    want = plain(model, variables)
    with pytest.raises(ArithmeticError, match="mine"):
        hooked(model, variables, broken)
    np.testing.assert_array_equal(plain(Model(salt="after the error"), variables), want)
    np.testing.assert_array_equal(plain(model, variables), want)
    assert not jax.config.jax_disable_jit
    assert_same(hooked(model, variables), want)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_another_number_of_layers_is_refused(num_layers):
    model = Model()
    with pytest.raises(RuntimeError, match=rf"each of {num_layers} layers, .* for \[0, 1\]"):
        hooked(model, variables_of(model), num_layers=num_layers)


class Mine(Attention):
    """A subclass, which could attend in another way."""


@pytest.mark.parametrize(
    ("block", "hook"),
    [(Mine, HOOK), (Attention, LinenHook("Attention", linen_model.forward))],
)
def test_another_class_keeps_its_attention_and_that_is_said(block, hook):
    model = Model(block=block)
    with pytest.raises(RuntimeError, match=r"it ran for \[\]"):
        hooked(model, variables_of(model), hook=hook)


class Layers(nn.Module):
    """The attention layers of a model in one scan."""

    def setup(self):
        body = nn.scan(
            lambda attn, x, mask: (x + attn(x, mask), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(nn.broadcast,),
            length=2,
        )
        self.attn, self.body = Attention(), body

    def __call__(self, x, mask):
        return self.body(self.attn, x, mask)[0]


class Rematerialised(nn.Module):
    """An attention layer inside nn.remat."""

    def setup(self):
        self.attn = Attention()

    def __call__(self, x, mask):
        return nn.remat(lambda attn, x: attn(x, mask))(self.attn, x)


@pytest.mark.parametrize("block", [Layers, Rematerialised])
def test_layers_that_are_traced_by_themselves_are_refused_by_name(block):
    model = Model(block=block)
    variables = variables_of(model)
    with pytest.raises(RuntimeError, match=r"layers_0/attn \(linen_model.Attention\) is traced"):
        hooked(model, variables)
    assert np.isfinite(plain(model, variables)).all()


def test_jit_and_loops_work_inside_the_attention():
    """The context takes jit from the model only: a scan of the attention stays a scan."""

    def looping(layer, q, k, v, cache):
        assert not jax.config.jax_disable_jit
        cache, _ = jax.lax.scan(lambda carry, _: (carry + 1, None), cache, length=5)
        return own_keys(layer, q, k, v, cache)

    def run(variables):
        with linen_attending(looping, 0, hook=HOOK, num_layers=2) as carrier:
            logits, _ = model.apply(variables, IDS, POSITIONS)
        return logits, carrier.pool

    model = Model()
    variables = variables_of(model)
    text = str(jax.make_jaxpr(run)(variables))
    assert text.count("scan[") == 2
    assert run(variables)[1] == 12


class NeedsDeviceArrays(Model):
    """A model that refuses NumPy arrays, which its own jit would have kept from it."""

    @nn.jit
    def __call__(self, token_ids, positions):
        assert isinstance(token_ids, jax.Array)
        each_itself = jnp.eye(token_ids.shape[1], dtype=bool)
        return self.head(self.layers[0](self.embedding[token_ids], each_itself)), None


def test_numpy_arguments_arrive_as_under_the_models_own_jit():
    model = NeedsDeviceArrays(num_layers=1)
    variables = variables_of(model)
    got = hooked(model, variables, own_keys, num_layers=1)
    assert_same(got, plain(model, variables))
