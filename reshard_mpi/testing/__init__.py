"""Test further formats: conformance suites to subclass, and hypothesis strategies.

Needs the `test` extra (pytest, hypothesis). No other part of the program imports it.
"""

import pytest

# So that a failure shows what was compared.
pytest.register_assert_rewrite(*(f"reshard_mpi.testing.{name}" for name in ("checkpoints", "conformance", "folders")))
