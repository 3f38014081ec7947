"""Where kernels cannot be run, the files here are skipped with the reason, before they import numba-cuda."""

import pytest

from tests.gpu_on_cpu import needs

NEEDS_NOTHING = ("test_without_device.py",)


class _Skipped(pytest.Module):
    def collect(self):
        pytest.skip(needs.missing())


def pytest_pycollect_makemodule(module_path, parent):
    if needs.missing() and module_path.name not in NEEDS_NOTHING:
        return _Skipped.from_parent(parent, path=module_path)
    return None
