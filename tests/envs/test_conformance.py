"""Every registered environment keeps every promise, as made by ``gym.make``."""

from __future__ import annotations

import pytest

from agentbench_prefix import environment_ids
from agentbench_prefix.testing import CHECKS, check_told_apart


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("env_id", environment_ids())
def test_conformance(env_id, check):
    check(env_id)


def test_environments_are_told_apart():
    check_told_apart(environment_ids())
