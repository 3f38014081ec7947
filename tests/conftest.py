"""Hypothesis profiles: `HYPOTHESIS_PROFILE=nightly pytest ...` (default ci)."""

import os
import signal

from hypothesis import HealthCheck, settings

_SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large]  # the first example of an op compiles it

settings.register_profile(
    "ci", derandomize=True, database=None, deadline=None, max_examples=25, suppress_health_check=_SLOW_IS_FINE
)
settings.register_profile(
    "nightly",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=500,
    suppress_health_check=_SLOW_IS_FINE,
)
settings.register_profile("dev", deadline=None, max_examples=50, suppress_health_check=_SLOW_IS_FINE)
# A shell that starts the suite in the background has Ctrl+C ignored, also in the processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
