"""The environments of ``agentbench-prefix``, one folder each.

They are also a plug-in of verifiers, which looks these names up when its taskset's id is
``agentbench-envs``; see :mod:`agentbench_prefix.adapters.verifiers`.
"""

from typing import Any

__all__ = ["ChatHarness", "PrefixTaskset", "TextGameEnv"]  # found when asked for


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agentbench_prefix.adapters import verifiers

    return getattr(verifiers, name)
