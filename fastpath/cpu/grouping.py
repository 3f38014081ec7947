"""Rows grouped by the expert that they are routed to, in memory where kernels find them.

work item   the whole call: a counting sort of a few thousand numbers at most
traffic     the ids twice, 16 bytes per entry out

The groups cannot be made in Python: a recorded program must find those of its own call.
"""

from dataclasses import dataclass

from fastpath.cpu import threads
from fastpath.cpu.buffers import address, integers, workspace
from fastpath.cpu.kernel import kernel
from fastpath.cpu.simd import ld_i32, ld_i64, st_i64


@dataclass(frozen=True)
class Groups:
    """Which rows meet which expert's matrix: for the entries i = starts[u] .. starts[u + 1] - 1
    out[out_rows[i]] = x[x_rows[i]] @ weight[experts[u]].T

    n_groups     U, min(entries, experts): how many experts there can be; those that are too many are empty
    addresses    of experts i64[U], starts i64[U + 1], x_rows i64[n], out_rows i64[n]; till the next call
    """

    n_groups: int
    n_entries: int
    addresses: tuple[int, int, int, int]


@kernel
def _group_kernel(args, lo, hi, thread):
    ids, n, n_experts, n_groups = ld_i64(args), ld_i64(args + 8), ld_i64(args + 16), ld_i64(args + 24)
    per_row, experts, starts = ld_i64(args + 32), ld_i64(args + 40), ld_i64(args + 48)
    x_rows, out_rows, next_of = ld_i64(args + 56), ld_i64(args + 64), ld_i64(args + 72)
    for e in range(n_experts):
        st_i64(next_of + 8 * e, 0)
    for i in range(n):
        at = next_of + 8 * ld_i32(ids + 4 * i)
        st_i64(at, ld_i64(at) + 1)
    group, start = 0, 0
    for e in range(n_experts):
        count = ld_i64(next_of + 8 * e)
        if count:
            st_i64(experts + 8 * group, e)
            st_i64(starts + 8 * group, start)
            st_i64(next_of + 8 * e, start)
            group, start = group + 1, start + count
    for u in range(group, n_groups):
        st_i64(experts + 8 * u, 0)
        st_i64(starts + 8 * u, n)
    st_i64(starts + 8 * n_groups, n)
    for i in range(n):
        at = next_of + 8 * ld_i32(ids + 4 * i)
        entry = ld_i64(at)
        st_i64(at, entry + 1)
        st_i64(x_rows + 8 * entry, i // per_row)
        st_i64(out_rows + 8 * entry, i)


def group_by_expert(expert_ids, n_experts, entries_per_row):
    """The groups of ids i32[T, A], experts ascending, entries of one expert in the order of the ids.

    expert_ids       all in 0 .. n_experts - 1: the caller has seen to it
    entries_per_row  entries that share a row of x: A if x is [T, C], 1 if it is [T, A, C]
    """
    ids = integers(expert_ids, expert_ids.shape, "expert_ids")
    n = ids.size
    n_groups = min(n, n_experts)
    sizes = (n_groups, n_groups + 1, n, n, n_experts)
    starts = [workspace(8 * sum(sizes), "groups")]
    for size in sizes[:-1]:
        starts.append(starts[-1] + 8 * size)
    args = (address(ids), n, n_experts, n_groups, entries_per_row, *starts)
    threads.run(_group_kernel, args, 1, label="group_by_expert")
    return Groups(n_groups, n, tuple(starts[:4]))
