"""The worlds that BabyAI's teacher plans in do what the environment does."""

import random

import pytest

from agentbench_envs.babyai.board import Board
from agentbench_envs.babyai.levels import LEVELS
from agentbench_envs.babyai.macros import Choices, run
from agentbench_envs.babyai.mission import Game
from agentbench_envs.babyai.teacher import written
from agentbench_envs.babyai.view import look


@pytest.mark.parametrize("level", range(1, len(LEVELS) + 1))
def test_worlds_predict_what_is_seen_and_what_every_action_leads_to(level):
    board = Board(level, 7)
    raw, dice = board.raw, random.Random(level)
    game = Game(raw)
    for _ in range(12):
        here = game.look()
        assert set(here.layout.view(here.cell, here.heading)) == look(raw).cells
        choices, texts = Choices(raw), written(raw)
        assert {*texts.values(), "check available actions"} == set(choices.actions)
        possible = {macro for macro, _ in here.moves()}
        assert possible <= set(texts)
        before = board.state()
        for macro, text in sorted(texts.items()):
            ran = run(raw, choices.low_level(choices.actions[text]))
            # A game that ends within a macro action goes no further.
            assert ran.terminated or here.after(macro) == game.look(), text
            board.set_state(before)
        chosen = dice.choice(sorted(texts.values()))
        if run(raw, choices.low_level(choices.actions[chosen])).terminated:
            board.set_state(before)
