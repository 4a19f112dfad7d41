"""What a plan's arrays make every packed row read, counted by brute force in NumPy."""

import numpy as np

TILE_ROWS = 64


def times_read(plan, batch):
    """How often each request's rows read each token slot: `[kv_heads, requests, group, slots]`.

    A slot is a row of a page entry. Packed rows between requests are nobody's, and not counted.
    """
    num_rows = (int(plan.packed_row[: len(batch.token_lists)].max()) // TILE_ROWS + 1) * TILE_ROWS
    counts = np.zeros((plan.num_kv_heads, num_rows, num_slots(batch)), np.int8)
    segments = plan.segments
    for i in used_segments(plan):
        first_row = segments.tile[i] * TILE_ROWS
        end_row = first_row + segments.num_tiles[i] * TILE_ROWS
        for step in range(segments.step_lo[i], segments.step_lo[i] + segments.num_steps[i]):
            rows = slice(
                max(first_row, plan.steps.row_lo[step]), min(end_row, plan.steps.row_hi[step])
            )
            counts[segments.kv_head[i], rows, live_slots(plan, batch, step)] += 1
    return counts[:, plan.packed_row[: len(batch.token_lists)]]


def num_slots(batch):
    """Rows of all page entries in use."""
    return int(batch.arrays.num_page_entries) * batch.forest.page_size


def used_segments(plan):
    """Segments in the order in which the workers run them."""
    ranges = zip(plan.worker_indptr[:-1], plan.worker_indptr[1:], strict=True)
    return [i for lo, hi in ranges for i in range(lo, hi)]


def live_slots(plan, batch, step):
    """Slots (page entry * page size + row) of the live tokens of a step's page."""
    page_size = batch.forest.page_size
    tokens = step_tokens(plan, batch, step)
    row = tokens.start - plan.steps.kv_start[step]
    start = plan.steps.page_entry[step] * page_size + row
    return slice(start, start + len(tokens))


def step_tokens(plan, batch, step):
    """The range of its node's tokens that a step reads."""
    start = plan.steps.kv_start[step]
    kv_len = batch.arrays.kv_len[plan.steps.node[step]]
    end = min(start + batch.forest.page_size, kv_len)
    return range(max(start, 0), max(end, max(start, 0)))


def path_slots(batch, request):
    """Slot of every token of a request, walked over the forest and not over its arrays."""
    forest, entry, first_entry = batch.forest, 0, {}
    for node_id in forest.preorder():
        first_entry[node_id] = entry
        entry += forest.node(node_id).page_ids.size
    slots = [np.zeros(0, int)]
    for node_id in forest.path(forest.end_node(request)):
        node = forest.node(node_id)
        start = first_entry[node_id] * forest.page_size + node.first_row
        slots.append(start + np.arange(node.kv_len))
    return np.concatenate(slots)


def wanted_reads(plan, batch):
    """Every row reads every token of its request's path once, for each KV head."""
    num_requests, group = len(batch.token_lists), plan.packed_row.shape[1]
    wanted = np.zeros((num_requests, num_slots(batch)), np.int8)
    for request in range(num_requests):
        wanted[request, path_slots(batch, request)] = 1
    shape = (plan.num_kv_heads, num_requests, group, wanted.shape[1])
    return np.broadcast_to(wanted[:, None], shape)


def token_counts(plan, batch):
    """How often each request's first row reads each of its tokens: `[kv_heads, tokens]` each."""
    counts = times_read(plan, batch)
    return [
        counts[:, request, 0][:, path_slots(batch, request)]
        for request in range(len(batch.token_lists))
    ]
