"""The baselines of ``agentbench-prefix``: one module a method, recipes and checkpoints beside."""
