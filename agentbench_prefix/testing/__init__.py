"""Conformance suite: what every environment promises, as checks that anybody can run.

One parametrised test covers an environment (needs ``hypothesis`` and ``pytest``)::

    import pytest
    from agentbench_prefix.testing import CHECKS

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_conformance(check):
        check("MyGame-v0")

A check takes a registered id (``"module:MyGame-v0"`` if importing ``module`` registers it) or a
zero-argument module-level function that returns a new environment.
"""

from agentbench_prefix.testing.conformance import (
    CHECKS,
    Check,
    ConformanceError,
    check_environment,
    check_told_apart,
)
from agentbench_prefix.testing.play import Target, make_environment

__all__ = [
    "CHECKS",
    "Check",
    "ConformanceError",
    "Target",
    "check_environment",
    "check_told_apart",
    "make_environment",
]
