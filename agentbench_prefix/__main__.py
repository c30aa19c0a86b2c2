"""``python -m agentbench_prefix``: the same as ``agentbench-prefix``."""

from agentbench_prefix.cli import main

main()
