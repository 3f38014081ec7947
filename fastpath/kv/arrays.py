"""Large arrays of zeros that cost memory only where they are touched."""

import math
import mmap

import numpy as np

LINE, HUGE_PAGE = 64, 2 << 20  # bytes


def zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Aligned to cache lines, and large ones to Linux's huge pages.

    The first 2 MB have small pages: a cache has dozens of arrays, of which a short sequence uses little.

    Raises:
        MemoryError: the system does not give so much address space; names the bytes
    """
    size = math.prod(shape) * dtype.itemsize
    align = HUGE_PAGE if size > HUGE_PAGE else LINE
    try:
        memory = _mapped(size + align) if size > HUGE_PAGE else np.zeros(size + align, np.uint8)
    except (OSError, OverflowError, ValueError, MemoryError) as error:
        raise MemoryError(f"{size} bytes were refused: {error}") from None
    start = -memory.ctypes.data % align
    return memory[start : start + size].view(dtype).reshape(shape)


def _mapped(size: int) -> np.ndarray:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(size, np.uint8)
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(area, np.uint8)
    small = -memory.ctypes.data % HUGE_PAGE + HUGE_PAGE
    page = mmap.PAGESIZE
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # for where huge pages are the rule
        area.madvise(mmap.MADV_NOHUGEPAGE, 0, min(small, size))
    if small < size:
        area.madvise(mmap.MADV_HUGEPAGE, small // page * page)
    return memory
