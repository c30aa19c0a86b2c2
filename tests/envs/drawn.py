"""Minigrid games drawn by hand, for tests of what is seen and done in them.

``#`` wall, ``.`` empty, ``@`` the player. Two characters are a thing: its kind (k key, o ball,
x box, d closed door, p open door, l locked door) and the first letter of its colour, ``e`` for
grey.
"""

from __future__ import annotations

from minigrid.core.grid import Grid
from minigrid.core.world_object import Ball, Box, Door, Key, Wall

from agentbench_envs.babyai.board import new_game

COLORS = {"r": "red", "g": "green", "b": "blue", "p": "purple", "y": "yellow", "e": "grey"}
RIGHT, DOWN, LEFT, UP = range(4)


def thing(kind, color):
    if kind == "k":
        return Key(color)
    if kind == "o":
        return Ball(color)
    if kind == "x":
        return Box(color)
    return Door(color, is_open=kind == "p", is_locked=kind == "l")


def draw(picture, heading=RIGHT, instruction=None, *, carrying=None, max_steps=64):
    """A game whose cells are the words of each line."""
    rows = [line.split() for line in picture.strip().splitlines()]
    game = new_game(1, 0)
    game.grid = Grid(len(rows[0]), len(rows))
    game.width, game.height = game.grid.width, game.grid.height
    for j, row in enumerate(rows):
        for i, word in enumerate(row):
            if word == "#":
                game.grid.set(i, j, Wall())
            elif word == "@":
                game.agent_pos, game.agent_dir = (i, j), heading
            elif word != ".":
                game.put_obj(thing(word[0], COLORS[word[1]]), i, j)
    game.carrying = None if carrying is None else thing(carrying[0], COLORS[carrying[1]])
    # What is carried was taken up in a step before.
    game.max_steps, game.step_count = max_steps, 0 if carrying is None else 1
    if instruction is not None:
        game.instrs = instruction
        game.instrs.reset_verifier(game)
    return game
