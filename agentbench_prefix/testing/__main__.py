"""Entry point of ``python -m agentbench_prefix.testing``; see :mod:`.play`."""

from agentbench_prefix.testing.play import main

if __name__ == "__main__":
    main()
