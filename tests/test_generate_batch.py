"""A batch on the host: options, what is shared by hand counts, memory, and every refusal."""

import dataclasses

import jax
import numpy as np
import pytest
from generate_cases import compilations, stories, toy_model

import codec_jax.generate_batch as generate_batch
from codec_jax.generate import Generation
from codec_jax.generate_batch import Batch, NodeSharing, Options
from codec_jax.generate_memory import Memory, workspace_bytes
from codec_jax.generate_requests import read_requests
from codec_jax.models.memory import as_gib
from codec_jax.planning.cost import CostModel
from codec_jax.planning.profiles import CostProfile
from codec_jax.sampling import Sampling

PREFIX = list(range(10, 50))
TREE = [[*PREFIX, 1, 2, 3], [*PREFIX, 1, 2, 4, 4], [*PREFIX, 9], [7, 7]]


def make_batch(prompts, *, sampling=None, **options):
    requests = read_requests(stories(), prompts, sampling or Sampling(max_new_tokens=20))
    return Batch(stories(), requests, options=Options(**options))


@pytest.mark.parametrize(
    "name", ["page_size", "steps_per_visit", "prefill_chunk", "num_workers", "num_pages"]
)
@pytest.mark.parametrize("value", [0, -1, 2.0, "16"], ids=repr)
def test_sizes_that_are_no_positive_integers_are_refused(name, value):
    with pytest.raises(ValueError) as error:
        Options(**{name: value})
    assert str(error.value) == f"`{name}` must be a positive integer; got {value!r}."


@pytest.mark.parametrize("name", ["page_size", "steps_per_visit", "prefill_chunk"])
def test_sizes_without_a_default_must_be_given(name):
    with pytest.raises(ValueError, match=f"`{name}` must be a positive integer; got None."):
        Options(**{name: None})


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match=r"`policy` must be one of balanced, .*; got 'fastest'"):
        Options(policy="fastest")


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match=r"`implementation` must be one of .*; got 'cuda'"):
        make_batch([[5]], implementation="cuda")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU may have the kernels")
def test_kernels_that_cannot_run_here_are_refused_with_the_reason():
    with pytest.raises(NotImplementedError, match=r"'mosaic_gpu' cannot do this: .* Use 'xla'"):
        make_batch([[5]], implementation="mosaic_gpu")


def test_a_pool_that_cannot_hold_the_prompts_is_refused():
    with pytest.raises(ValueError) as error:
        make_batch([[5] * 33, [6]], page_size=16, num_pages=3)
    assert str(error.value) == "`num_pages` must hold the prompts, 4 pages; got 3."
    assert make_batch([[5] * 33, [6]], page_size=16, num_pages=4).sizes.pages == 4


def test_a_batch_beyond_the_devices_memory_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(generate_batch, "available_bytes", lambda: 2**20)
    with pytest.raises(ValueError, match=r"`prompts` need .*, the device has 1\.0 MiB\. Lower "):
        make_batch([[5]])


MEMORY = Memory(weights_bytes=3 * 2**30, pool_bytes=1, workspace_bytes=2, available_bytes=2**30)


@pytest.mark.parametrize(
    ("memory", "advice"),
    [
        (MEMORY, "the size of the model, or take `dtype` bfloat16"),
        (
            dataclasses.replace(MEMORY, pool_bytes=2**40),
            "`num_samples`, `max_new_tokens` or the number of prompts",
        ),
        (
            dataclasses.replace(MEMORY, workspace_bytes=2**41),
            "`num_samples` or the number of prompts",
        ),
    ],
)
def test_the_refusal_says_what_to_lower(memory, advice):
    with pytest.raises(ValueError) as error:
        memory.check()
    assert str(error.value) == (
        f"`prompts` need {as_gib(memory.needed_bytes)} ({memory}), the device has 1.00 GiB."
        f" Lower {advice}."
    )


def test_memory_that_suffices_or_is_unknown_is_no_refusal():
    dataclasses.replace(MEMORY, available_bytes=None).check()
    dataclasses.replace(MEMORY, available_bytes=MEMORY.needed_bytes).check()


def test_memory_by_hand():
    batch = make_batch([[5] * 33], page_size=16)
    assert batch.memory.pool_bytes == batch.sizes.pages * 2 * 5 * 4 * 16 * 8 * 4
    config = stories().decoder.config
    num_params = sum(x.size for x in stories().decoder.arrays().values())
    assert batch.memory.weights_bytes == 4 * num_params
    sizes = {"batch_size": 8, "num_tiles": 3, "page_size": 16, "prefill_chunk": 8}
    small = workspace_bytes(config, **sizes)
    assert small < workspace_bytes(config, **(sizes | {"batch_size": 512}))
    assert small < workspace_bytes(config, **(sizes | {"prefill_chunk": 512}))


def test_o28_statistics_by_hand():
    generation = Generation(
        stories(),
        TREE,
        sampling=[Sampling(num_samples=2), Sampling(), Sampling(), Sampling()],
        options=Options(page_size=16, prefill_chunk=32, policy="flash_decoding"),
    )
    statistics = generation.statistics
    assert statistics.unique_kv_tokens == 40 + 2 + 1 + 2 + 1 + 2
    assert statistics.total_kv_tokens == 43 + 43 + 44 + 41 + 2
    assert statistics.num_prefill_rows == 2 * 32
    assert statistics.num_prefill_padding == 64 - 48
    # 43 tokens, of which the first 40 and 42 are split off in place; then [4, 4], [9] and [7, 7].
    assert statistics.num_prompt_pages == 3 + 1 + 1 + 1
    assert statistics.policy == "flash_decoding"
    assert "reads its whole path by itself" in statistics.policy_rule
    assert statistics.implementation in ("xla", "mosaic_gpu")
    assert statistics.reason


READ_ONCE = {
    "balanced": {40: True, 2: True, 1: True},
    "hydragen": {40: True, 2: False, 1: False},
    "flash_decoding": {40: False, 2: False, 1: False},
}


@pytest.mark.parametrize("policy", READ_ONCE)
def test_o28_sharing_of_each_row_by_hand(policy):
    sampling = [Sampling(num_samples=2), Sampling(), Sampling(), Sampling()]
    batch = make_batch(TREE, sampling=sampling, policy=policy)
    once = READ_ONCE[policy]
    trunk, fork = NodeSharing(40, 4, once[40]), NodeSharing(2, 3, once[2])
    assert batch.sharing(0) == batch.sharing(1) == [trunk, fork, NodeSharing(1, 2, once[1])]
    assert batch.sharing(2) == [trunk, fork]
    assert batch.sharing(3) == [trunk]
    assert batch.sharing(4) == []


def test_o28_reads_saved_add_up_to_what_sharing_saves():
    batch = make_batch(TREE)
    saved = sum(node.reads_saved for row in range(4) for node in batch.sharing(row))
    assert saved == pytest.approx(batch.forest.total_tokens - batch.forest.unique_tokens)
    assert NodeSharing(30, 3, is_read_once=True).reads_saved == pytest.approx(20)
    assert NodeSharing(30, 3, is_read_once=False).reads_saved == 0


def test_a_batch_is_made_without_compiling_and_without_arrays_on_the_device():
    stories()
    num_arrays = len(jax.live_arrays())
    with compilations() as events:
        generation = Generation(stories(), TREE, sampling=Sampling(num_samples=5))
        assert generation.statistics.unique_kv_tokens == 48
        assert generation.memory.needed_bytes > 0
    assert events == []
    assert len(jax.live_arrays()) == num_arrays


def test_an_empty_batch_has_statistics():
    statistics = Generation(toy_model(), []).statistics
    assert (statistics.unique_kv_tokens, statistics.total_kv_tokens) == (0, 0)
    assert (statistics.num_prompt_pages, statistics.num_prefill_rows) == (0, 0)


def test_requests_are_rows():
    batch = make_batch(TREE)
    arrays = batch.arrays()
    assert sorted(arrays.request_row[:4].tolist()) == [0, 1, 2, 3]
    for request in range(4):
        path = batch.forest.path(batch.forest.end_node(request))
        runs = [batch.forest.node(node_id).tokens for node_id in path]
        assert np.concatenate(runs).tolist() == TREE[request]


def test_sizes_beyond_32_bit_arithmetic_are_refused():
    with pytest.raises(ValueError, match=r"^`steps_per_visit` must be at most 16777216; got "):
        Options(steps_per_visit=2**33)
    assert Options(page_size=np.int64(16)).page_size == 16


def test_plans_take_the_costs_that_were_measured_for_the_kernels(monkeypatch):
    profile = CostProfile(
        dtype="float32",
        head_dim=8,
        page_size=16,
        num_workers=2,
        step_us=1.0,
        wide_step_us=1.5,
        segment_us=2.0,
        slot_us=0.25,
        launch_us=5.0,
        bytes_per_us=4e6,
        flops_per_us=7e8,
        cache_bytes=4e7,
    )
    wanted = []
    monkeypatch.setattr(
        generate_batch, "find_profile", lambda *args, **kwargs: wanted.append(kwargs) or profile
    )
    batch = make_batch(TREE, page_size=16)
    assert batch.cost == CostModel.closed_form(batch.spec)  # the XLA path has other costs
    batch.implementation = "mosaic_gpu"
    assert batch.cost == CostModel(
        step_ticks=64, wide_step_ticks=96, segment_ticks=128, slot_ticks=32
    )
    assert wanted[-1] == {"dtype": "float32", "head_dim": 64, "page_size": 16}
