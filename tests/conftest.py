"""What every process of the tests sets before it loads anything, and the fixtures in those that run tests."""

import gc
import os
import tempfile

import pytest
from hypothesis import settings

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # equalities to the last bit are promised on the CPU
if IS_WORKER:  # a core each for the workers of `make test`, and for what they start
    os.environ.setdefault("OMP_NUM_THREADS", "1")
else:
    rehearsals = tempfile.TemporaryDirectory()  # shared by all workers, and by what they start
    os.environ["SAGE_GRPO_CACHE"] = rehearsals.name
settings.register_profile("long", max_examples=10_000)
if "HYPOTHESIS_PROFILE" in os.environ:
    settings.load_profile(os.environ["HYPOTHESIS_PROFILE"])


def pytest_configure(config: pytest.Config) -> None:
    """Load PyTorch and the fixtures, but not in the process that only hands tests to workers."""
    if IS_WORKER or not config.getoption("numprocesses", None):
        gc.disable()  # imports leave no garbage; tests.support.fixtures turns it on again
        config.pluginmanager.import_plugin("tests.support.fixtures")
