"""Which tokens meet which expert, on the device: slots of one matrix and up to four rows.

A slot is (expert, entry, entry, entry, entry); entry t * A + a is what token t asks of its expert number a;
-1: none.  So an expert's weights are read once for four of its tokens, and no weights that nobody asked for.

grid       one block, a thread per expert
traffic    all choices, twice per warp
"""

from numba import cuda, int32

from fastpath.cuda import device
from fastpath.cuda.kernel import Kernel

TOKENS = 4
SLOT = 1 + TOKENS
MAX_EXPERTS = 256


def slots_of(expert_ids, n_experts):
    """expert_ids i32[T, A] -> slots i32[n, 5]; those that are not needed have expert -1 and come last."""
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
    """(matrix, number of rows, four rows of x) of block y; matrix -1: nothing to do.

    share: rows of the result that come from one of x; 0: there are no slots, row after row meets one matrix
    """
    t0 = int32(y * TOKENS)
    if share == 0:
        n = int32(min(TOKENS, n_rows - t0))
        return int32(0), n, t0, int32(t0 + 1), int32(t0 + 2), int32(t0 + 3)
    a, b, c, d = slots[y, 1], slots[y, 2], slots[y, 3], slots[y, 4]
    n = int32(1) + int32(b >= 0) + int32(c >= 0) + int32(d >= 0)
    return slots[y, 0], int32(n), int32(a // share), int32(b // share), int32(c // share), int32(d // share)


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
