"""The environments of ``agentbench-prefix``, one folder each."""
