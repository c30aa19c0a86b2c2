"""TextCraft: craft a goal item from a printed list of crafting commands.

``TextCraft-v0`` follows the rules of TextCraft (Prasad et al. 2024, ADaPT) as AgentGym's server
plays them, with its faults mended; see :class:`agentbench_envs.textcraft.env.TextCraftEnv`.
"""
