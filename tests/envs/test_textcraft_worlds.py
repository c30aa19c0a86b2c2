"""Generated worlds."""

from __future__ import annotations

import pytest

from agentbench_envs.textcraft.planner import Craft, plan
from agentbench_envs.textcraft.worlds import is_generated, task_ids, world


def test_every_step_of_a_plan_is_what_the_game_does():
    for task_id in task_ids(7, 3000):
        made = world(task_id)
        for step in plan(made.book, made.goal):
            if isinstance(step, Craft):
                assert made.book.match(step.recipe.output, step.given) is step.recipe, task_id


def test_no_item_has_two_recipes_that_take_the_same():
    for task_id in task_ids(7, 3000):
        for recipes in world(task_id).book.by_output.values():
            assert len({frozenset(recipe.inputs) for recipe in recipes}) == len(recipes), task_id


def test_a_world_has_the_depth_its_id_names():
    for depth in (1, 2, 3, 4):
        for task_id in task_ids(3, 200, depth):
            made = world(task_id)
            assert made.depth == made.book.depth(made.goal) == depth


def test_ids_are_a_function_of_the_seed_and_grow_at_the_end():
    assert task_ids(5, 20)[:10] == task_ids(5, 10)
    assert not set(task_ids(5, 50)) & set(task_ids(6, 50))
    assert all(map(is_generated, task_ids(5, 20)))


@pytest.mark.parametrize(
    "task_id", ["generated_1_2", "generated_01_2_d1", "generated_1_2_d5", "generated_1_2_d1 ", ""]
)
def test_other_ids_are_no_worlds(task_id):
    assert not is_generated(task_id)
    with pytest.raises(ValueError, match="does not name"):
        world(task_id)


@pytest.mark.parametrize(("seed", "n", "depth"), [(-1, 1, None), (1, -1, None), (1, 1, 5)])
def test_arguments_out_of_range_are_refused(seed, n, depth):
    with pytest.raises(ValueError, match="must be"):
        task_ids(seed, n, depth)
