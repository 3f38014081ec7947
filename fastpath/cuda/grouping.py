"""Which tokens meet which expert, on the device: slots of one matrix and up to eight rows.

A slot is (expert, 8 entries); entry t * A + a is what token t asks of its expert number a; -1: none.  So an
expert's weights are read once for eight of its tokens, and no weights that nobody asked for.

grid       one block, a thread per expert
traffic    all choices, twice per warp
"""

from numba import cuda, int32, uint32

from fastpath.cuda import device
from fastpath.cuda.kernel import Kernel
from fastpath.cuda.warp import WHOLE_WARP

TOKENS = 8
SLOT = 1 + TOKENS
MAX_EXPERTS = 256


def slots_of(expert_ids, n_experts):
    """expert_ids i32[T, A] -> slots i32[n, 9]; those that are not needed have expert -1 and come last."""
    n = expert_ids.size
    n_slots = min(n, n_experts + n // TOKENS)
    slots = device.current().empty((n_slots, SLOT), "int32")
    device.current().launch(GROUP, 1, MAX_EXPERTS, expert_ids.reshape(-1), slots)
    return slots


def no_slots():
    """For products with one matrix."""
    return device.current().empty((1, SLOT), "int32")


@cuda.jit(device=True)
def entries_of(slots, share, n_rows, y):
    """(matrix, number of rows, eight rows of x) of block y; matrix -1: nothing to do.

    The first row stands in for those that are not there: whoever reads them, too, finds something.

    share: rows of the result that come from one of x; 0: there are no slots, row after row meets one matrix
    """
    matrix, n, a = int32(0), int32(1), int32(y * TOKENS)
    if share != 0:
        matrix, a = slots[y, 0], slots[y, 1]
        while n < TOKENS and slots[y, 1 + n] >= 0:
            n = int32(n + 1)
        a = _row_of(a, share)
    else:
        n = int32(min(TOKENS, n_rows - a))
    b = c = d = e = f = g = h = a
    if n > 1:
        b = _row(slots, share, y, 1)
    if n > 2:
        c = _row(slots, share, y, 2)
    if n > 3:
        d = _row(slots, share, y, 3)
    if n > 4:
        e = _row(slots, share, y, 4)
    if n > 5:
        f = _row(slots, share, y, 5)
    if n > 6:
        g = _row(slots, share, y, 6)
    if n > 7:
        h = _row(slots, share, y, 7)
    return matrix, n, a, b, c, d, e, f, g, h


@cuda.jit(device=True)
def _row(slots, share, y, k):
    """Of x, which row k of block y meets."""
    return int32(y * TOKENS + k) if share == 0 else _row_of(slots[y, 1 + k], share)


@cuda.jit(device=True)
def _row_of(entry, share):
    return entry if share == 1 else int32(uint32(entry) // uint32(share))


@cuda.jit(device=True)
def row_of_lane(slots, share, n_rows, y):
    """(matrix, number of rows, a row of x) of block y, for a whole warp; see above.

    Of every 8 lanes side by side lane k has row k, or the first one where there is none.
    """
    k = int32(cuda.threadIdx.x & (TOKENS - 1))
    if share == 0:
        first = int32(y * TOKENS)
        n = int32(min(TOKENS, n_rows - first))
        row = int32(first + (k if k < n else int32(0)))
        return int32(0), n, row
    entry = slots[y, 1 + k]
    n = int32(cuda.popc(cuda.ballot_sync(WHOLE_WARP, entry >= 0)) >> 2)
    if entry < 0:
        entry = slots[y, 1]
    return slots[y, 0], n, _row_of(entry, share)


@cuda.jit(device=True)
def entry_of(slots, share, k, y):
    """The row of the result that row k of block y is."""
    if share == 0:
        return int32(y * TOKENS + k)
    return slots[y, 1 + k]


@cuda.jit(device=True)
def group(ids, slots):
    """By one block of MAX_EXPERTS threads."""
    counts = cuda.shared.array(MAX_EXPERTS, int32)
    e, n = cuda.threadIdx.x, int32(0)
    for i in range(ids.size):
        if ids[i] == e:
            n += int32(1)
    counts[e] = (n + TOKENS - 1) // TOKENS
    cuda.syncthreads()
    first, total = int32(0), int32(0)
    for other in range(MAX_EXPERTS):
        if other < e:
            first += counts[other]
        total += counts[other]
    place = first * TOKENS
    for i in range(ids.size):
        if ids[i] == e:
            slots[place // TOKENS, 1 + place % TOKENS] = i
            place += int32(1)
    end = first + counts[e]
    for i in range(place, end * TOKENS):
        slots[i // TOKENS, 1 + i % TOKENS] = int32(-1)
    for slot in range(first, end):
        slots[slot, 0] = e
    for slot in range(total + e, slots.shape[0], MAX_EXPERTS):
        slots[slot, 0] = int32(-1)


def _group_kernel(ids, slots):
    group(ids, slots)


GROUP = Kernel(_group_kernel, (int32[::1], int32[:, ::1]), name="group_by_expert", writes=("slots",))
KERNELS = (GROUP,)
