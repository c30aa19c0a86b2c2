"""BabyAI: forty levels of missions in a grid world, told and played in text.

``BabyAI-Text-v0`` plays minigrid's BabyAI levels (Chevalier-Boisvert et al. 2019) in the text form
of AgentGym's server, with its faults mended; see :class:`agentbench_envs.babyai.env.BabyAIEnv`.
"""
