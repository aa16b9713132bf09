"""Test further formats: conformance suites to subclass, and hypothesis strategies.

They need the `test` extra (pytest, hypothesis). The program itself imports no more than `sample_tensors`.
"""

import sys

if "pytest" in sys.modules:
    import pytest

    # So that a failure shows what was compared.
    pytest.register_assert_rewrite(
        *(f"{__name__}.{name}" for name in ("checkpoints", "conformance", "folders", "sample_tensors"))
    )
