"""The memory pool: blocks are used again, never by two at a time, and not more is kept than is allowed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpath.cuda.pool import LEAST, Pool, size_class


class Memory:
    """A device of `capacity` bytes, whose addresses never come again."""

    def __init__(self, capacity):
        self.capacity, self.used, self.next, self.n_allocated = capacity, 0, 1 << 20, 0

    def allocate(self, n_bytes):
        if self.used + n_bytes > self.capacity:
            raise MemoryError(f"{n_bytes} bytes")
        self.next += n_bytes + 100
        self.n_allocated += 1
        return _Piece(self, n_bytes), self.next - n_bytes


class _Piece:
    def __init__(self, device, n_bytes):
        self.device, self.n_bytes = device, n_bytes
        device.used += n_bytes

    def __del__(self):
        self.device.used -= self.n_bytes


@given(n=st.integers(0, 1 << 40))
def test_sizes(n):
    """Room enough, a quarter too much at most, and few different ones."""
    size = size_class(n)
    assert size >= n and size % 128 == 0 and size_class(size) == size
    assert size <= max(LEAST, n * 1.25)


@given(data=st.data())
def test_blocks(data):
    """Against a model: who is alive overlaps with nobody, and what is lent, free and used adds up."""
    device = Memory(60_000)
    pool = Pool(device.allocate, most=20_000)
    alive = []
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["take", "take", "drop", "clear"]))
        if action == "take":
            n = data.draw(st.sampled_from([0, 1, 500, 513, 700, 4000, 4001, 9000, 30_000]))
            lent = sum(block.size for block in alive)
            try:
                block = pool.take(n)
            except MemoryError:
                assert lent + size_class(n) > device.capacity and pool.n_free == 0
                continue
            assert block.size >= n
            for other in alive:
                assert (
                    block.address + block.size <= other.address or other.address + other.size <= block.address
                )
            alive.append(block)
        elif action == "drop" and alive:
            del alive[data.draw(st.integers(0, len(alive) - 1))]
            block = other = None
            assert pool.n_lent == sum(b.size for b in alive)
        elif action == "clear":
            pool.clear()
            assert pool.n_free == 0
        block = other = None
        pool._collect()
        assert pool.n_free <= 20_000
        assert device.used == pool.n_free + pool.n_lent
    alive.clear()
    pool.clear()
    assert device.used == 0


def test_a_loop_allocates_twice():
    device = Memory(1 << 20)
    pool = Pool(device.allocate)
    x = pool.take(3000)
    for _ in range(100):
        x = pool.take(3000)
    assert device.n_allocated == 2 and x.size == size_class(3000)


def test_unused_blocks_make_room_for_others():
    device = Memory(10_000)
    pool = Pool(device.allocate)
    blocks = [pool.take(1024) for _ in range(9)]
    del blocks
    assert pool.take(8192).size == 8192 and pool.n_free == 0
    with pytest.raises(MemoryError):
        pool.take(10_001)
