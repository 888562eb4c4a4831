"""A mixture layer in one parallel region, compiled: tokens grouped by expert, both products, the weighted sums.

Each phase is a list of items that threads take from the phase's counter; a thread that finds none left waits until all
are done. An expert's weights lie in panels, as in ``panel_product``. Gate and up panels alternate, so that the
activation between the products finds its operands in the core's cache. Each sum runs over its input in order, whatever
the number of rows: a token's result does not depend on the rest of the batch.
"""

from functools import cache

import numpy as np
from numba import carray, njit

from engine.kernels.activation import ALPHA, CLAMPED_GATE, LIMIT, NUM_CLAMP_NUMBERS, bend_row
from engine.kernels.compiled import BODY_OPTIONS, PART_OPTIONS, STORAGE, compile_kernel
from engine.kernels.machine_code import add_to, address_of, look_at, narrow, pointer, take_next, widen
from engine.kernels.products.tile_product import MAX_ROWS, PANEL, multiply_tile
from engine.kernels.row_loops import add_row, clamped_gate_row

FLOAT32_BYTES, COUNTER_BYTES = 4, 8

COPIED_ROWS = 16
"""Rows that a thread takes at a time in the phases that only copy or sum."""

# The fields of the parameter block, all int64.
COUNTERS, INPUT, EXPERTS, WEIGHTS, OUTPUT = range(5)  # addresses
GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS, NUMBERS = range(5, 10)  # addresses
ROWS, INNER, RESULTS, TABLES = range(10, 14)  # addresses of scratch memory
NUM_TOKENS, NUM_ACTIVE, NUM_EXPERTS, HIDDEN_SIZE, INNER_SIZE, KIND = range(14, 20)
ROW_STRIDE, INNER_STRIDE = 20, 21  # in elements
GATE_UP_HEIGHT, DOWN_HEIGHT = 22, 23  # rows of an expert that go through all its panels before the next rows
NUM_PARAMETERS = 24

GROUP, GATHER, BEND, PROJECT, ADD_UP = range(5)
NUM_PHASES = 5
NUM_COUNTERS = 2 * NUM_PHASES
"""For each phase the number of items taken, then for each phase the number of items done."""

EXPERT, FIRST, END = range(3)
BLOCK_FIELDS = 3
"""A block: an expert, its first row and the end of its rows, with rows in the order of experts."""


def max_blocks(num_rows: int, num_experts: int, height: int) -> int:
    """Upper bound of the number of blocks of at most ``height`` rows."""
    return num_experts + num_rows // height


def tables_size(num_rows: int, num_experts: int, num_blocks: int) -> int:
    """Number of int64 that TABLES needs; see ``_run`` for the layout."""
    return 2 * num_rows + num_experts + 1 + 2 + BLOCK_FIELDS * num_blocks


@njit(**PART_OPTIONS)
def _take(p, phase):
    return take_next(p[COUNTERS] + COUNTER_BYTES * phase)


@njit(**PART_OPTIONS)
def _finish(p, phase):
    add_to(p[COUNTERS] + COUNTER_BYTES * (NUM_PHASES + phase))


@njit(**PART_OPTIONS)
def _wait(p, phase, num_items):
    """Wait until all items of a phase are done."""
    while look_at(p[COUNTERS] + COUNTER_BYTES * (NUM_PHASES + phase)) < num_items:
        pass


@njit(**PART_OPTIONS)
def _cut(starts, height, blocks):
    """Cut each expert's rows into blocks of about equal height; returns the number of blocks."""
    count = 0
    for expert in range(len(starts) - 1):
        row, end = starts[expert], starts[expert + 1]
        for num_left in range((end - row + height - 1) // height, 0, -1):
            rows = (end - row + num_left - 1) // num_left
            blocks[count, EXPERT], blocks[count, FIRST], blocks[count, END] = expert, row, row + rows
            row += rows
            count += 1
    return count


@njit(**PART_OPTIONS)
def _group(experts, starts, places, sources):
    """Order rows by expert: starts, each expert's first row; places, each choice's row; sources, each row's choice."""
    starts[:] = 0
    for choice in range(len(experts)):
        starts[experts[choice] + 1] += 1
    for expert in range(1, len(starts)):
        starts[expert] += starts[expert - 1]
    for choice in range(len(experts)):  # starts[e] moves to the end of e
        row = starts[experts[choice]]
        starts[experts[choice]] += 1
        places[choice], sources[row] = row, choice
    for expert in range(len(starts) - 1, 0, -1):
        starts[expert] = starts[expert - 1]
    starts[0] = 0


@njit(**PART_OPTIONS)
def _bend_rows(p, numbers, scratch, gate, inner, height):
    """Apply the activation to ``height`` rows of a gate panel and its up panel in ``scratch``, into INNER."""
    for row in range(height):
        g = gate + row * 2 * PANEL * FLOAT32_BYTES
        u, target = g + PANEL * FLOAT32_BYTES, inner + row * p[INNER_STRIDE] * FLOAT32_BYTES
        if p[KIND] == CLAMPED_GATE:
            clamped_gate_row(g, u, target, PANEL, numbers[ALPHA], numbers[LIMIT], scratch[0])
        else:
            bend_row(p[KIND], g, u, target, PANEL, scratch[0])


@njit(**PART_OPTIONS)
def _bend(p, block, index, scratch, numbers, weight, weight_bytes):
    """First product and activation: one pair of panels for the rows of a block."""
    panel_bytes = p[HIDDEN_SIZE] * PANEL * weight_bytes
    pair = block[EXPERT] * (p[INNER_SIZE] // PANEL) + index
    panel = p[GATE_UP] + pair * 2 * panel_bytes
    bias = p[GATE_UP_BIAS] + pair * 2 * PANEL * FLOAT32_BYTES
    x_stride, y_stride = p[ROW_STRIDE] * FLOAT32_BYTES, 2 * PANEL * FLOAT32_BYTES
    y, row, end = address_of(scratch), block[FIRST], block[END]
    for num_left in range((end - row + MAX_ROWS - 1) // MAX_ROWS, 0, -1):
        height = (end - row + num_left - 1) // num_left
        x = p[ROWS] + row * x_stride
        for half in range(2):
            of_half, columns = panel + half * panel_bytes, half * PANEL * FLOAT32_BYTES
            multiply_tile(
                height, x, x_stride, of_half, p[HIDDEN_SIZE], bias + columns, 0, y + columns, y_stride, weight
            )
        target = p[INNER] + (row * p[INNER_STRIDE] + index * PANEL) * FLOAT32_BYTES
        _bend_rows(p, numbers, scratch, y, target, height)
        row += height


@njit(**PART_OPTIONS)
def _project(p, block, index, weight, weight_bytes):
    """Second product: one panel of the down projection for the rows of a block."""
    number = block[EXPERT] * (p[HIDDEN_SIZE] // PANEL) + index
    panel = p[DOWN] + number * p[INNER_SIZE] * PANEL * weight_bytes
    bias = p[DOWN_BIAS] + number * PANEL * FLOAT32_BYTES
    x_stride, y_stride = p[INNER_STRIDE] * FLOAT32_BYTES, p[HIDDEN_SIZE] * FLOAT32_BYTES
    row, end = block[FIRST], block[END]
    for num_left in range((end - row + MAX_ROWS - 1) // MAX_ROWS, 0, -1):
        height = (end - row + num_left - 1) // num_left
        y = p[RESULTS] + row * y_stride + index * PANEL * FLOAT32_BYTES
        multiply_tile(height, p[INNER] + row * x_stride, x_stride, panel, p[INNER_SIZE], bias, 0, y, y_stride, weight)
        row += height


@njit(**PART_OPTIONS)
def _add_up(p, token, places, weights, results, total, output):
    """The weighted sum of a token's experts, in the order of their scores."""
    total[:] = np.float32(0.0)
    for choice in range(token * p[NUM_ACTIVE], (token + 1) * p[NUM_ACTIVE]):
        result = address_of(results) + places[choice] * p[HIDDEN_SIZE] * FLOAT32_BYTES
        add_row(address_of(total), result, p[HIDDEN_SIZE], weights[choice], total[0])
    for i in range(p[HIDDEN_SIZE]):
        output[token, i] = narrow(total[i], output[token, i])


@njit(**PART_OPTIONS)
def _copy(p, first, end, sources, x, rows):
    for row in range(first, end):
        token = sources[row] // p[NUM_ACTIVE]
        for i in range(p[HIDDEN_SIZE]):
            rows[row, i] = widen(x[token, i])


@njit(**BODY_OPTIONS)
def _multiply(p, counts, bend_blocks, project_blocks, numbers, weight, weight_bytes):
    """Both products. All items of the first are done before the second begins."""
    scratch = np.empty(2 * PANEL * MAX_ROWS, dtype=np.float32)
    num_panels = p[INNER_SIZE] // PANEL
    num_items = counts[0] * num_panels
    item = _take(p, BEND)
    while item < num_items:
        _bend(p, bend_blocks[item // num_panels], item % num_panels, scratch, numbers, weight, weight_bytes)
        _finish(p, BEND)
        item = _take(p, BEND)
    _wait(p, BEND, num_items)

    num_panels = p[HIDDEN_SIZE] // PANEL
    num_items = counts[1] * num_panels
    item = _take(p, PROJECT)
    while item < num_items:
        _project(p, project_blocks[item // num_panels], item % num_panels, weight, weight_bytes)
        _finish(p, PROJECT)
        item = _take(p, PROJECT)
    _wait(p, PROJECT, num_items)


@njit(**BODY_OPTIONS)
def _run(p, x, output, weight, weight_bytes):
    """All phases; every thread runs this."""
    num_rows, num_tokens, num_experts = p[NUM_TOKENS] * p[NUM_ACTIVE], p[NUM_TOKENS], p[NUM_EXPERTS]
    # The arrays in TABLES, one after another.
    places = carray(pointer(p[TABLES]), (num_rows,), dtype=np.int64)
    sources = carray(pointer(p[TABLES] + COUNTER_BYTES * num_rows), (num_rows,), dtype=np.int64)
    after = p[TABLES] + 2 * COUNTER_BYTES * num_rows
    starts = carray(pointer(after), (num_experts + 1,), dtype=np.int64)
    after += COUNTER_BYTES * (num_experts + 1)
    counts = carray(pointer(after), (2,), dtype=np.int64)
    after += COUNTER_BYTES * 2
    most = num_experts + num_rows // p[GATE_UP_HEIGHT]
    bend_blocks = carray(pointer(after), (most, BLOCK_FIELDS), dtype=np.int64)
    after += COUNTER_BYTES * BLOCK_FIELDS * most
    most = num_experts + num_rows // p[DOWN_HEIGHT]
    project_blocks = carray(pointer(after), (most, BLOCK_FIELDS), dtype=np.int64)

    experts = carray(pointer(p[EXPERTS]), (num_rows,), dtype=np.int64)
    weights = carray(pointer(p[WEIGHTS]), (num_rows,), dtype=np.float32)
    numbers = carray(pointer(p[NUMBERS]), (NUM_CLAMP_NUMBERS,), dtype=np.float32)
    rows = carray(pointer(p[ROWS]), (num_rows, p[ROW_STRIDE]), dtype=np.float32)
    results = carray(pointer(p[RESULTS]), (num_rows, p[HIDDEN_SIZE]), dtype=np.float32)
    total = np.empty(p[HIDDEN_SIZE], dtype=np.float32)

    if _take(p, GROUP) == 0:
        _group(experts, starts, places, sources)
        counts[0] = _cut(starts, p[GATE_UP_HEIGHT], bend_blocks)
        counts[1] = _cut(starts, p[DOWN_HEIGHT], project_blocks)
        _finish(p, GROUP)
    _wait(p, GROUP, 1)

    num_items = (num_rows + COPIED_ROWS - 1) // COPIED_ROWS
    item = _take(p, GATHER)
    while item < num_items:
        _copy(p, item * COPIED_ROWS, min((item + 1) * COPIED_ROWS, num_rows), sources, x, rows)
        _finish(p, GATHER)
        item = _take(p, GATHER)
    _wait(p, GATHER, num_items)

    _multiply(p, counts, bend_blocks, project_blocks, numbers, weight, weight_bytes)

    num_items = (num_tokens + COPIED_ROWS - 1) // COPIED_ROWS
    item = _take(p, ADD_UP)
    while item < num_items:
        for token in range(item * COPIED_ROWS, min((item + 1) * COPIED_ROWS, num_tokens)):
            _add_up(p, token, places, weights, results, total, output)
        item = _take(p, ADD_UP)


@cache
def compiled_mixture(dtype, weight_dtype):
    """The address of ``void mixture(int64 *parameters)`` for tokens and for weights of these dtypes."""
    storage, weight = STORAGE[dtype], STORAGE[weight_dtype](0)
    weight_bytes = weight.itemsize

    def mixture(address):
        p = carray(address, (NUM_PARAMETERS,), dtype=np.int64)
        shape = (p[NUM_TOKENS], p[HIDDEN_SIZE])
        x, output = carray(pointer(p[INPUT]), shape, dtype=storage), carray(pointer(p[OUTPUT]), shape, dtype=storage)
        _run(p, x, output, weight, weight_bytes)

    return compile_kernel(mixture)
