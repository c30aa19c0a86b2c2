"""The suite passes a good environment, and every check catches what it is there for."""

from __future__ import annotations

import pytest
import toys

from agentbench_prefix.testing import (
    CHECKS,
    ConformanceError,
    check_environment,
    check_told_apart,
    conformance,
)

BROKEN = [
    (toys.WarnsOnStep, "check_gymnasium", "deprecated"),
    (toys.OldWarning, "check_gymnasium", "this will change"),
    (toys.AnotherDefaultLimit, "check_registration", "default_max_turns is 10"),
    (toys.NoneMeansDefault, "check_registration", "limit of 9: None is no limit"),
    (toys.LimitAsRule, "check_registration", "max_turns is no rule"),
    (toys.HashPerInstance, "check_registration", "same for every instance"),
    (toys.NothingToPlay, "check_play", "neither a teacher nor a candidate action"),
    (toys.NoCandidateAtAll, "check_play", r"implement candidate_actions\(\) or teacher\(\)"),
    (toys.RendersOlder, "check_render", "render"),
    (toys.LeakySplits, "check_splits", "share 6 tasks.*union_splits"),
    (toys.TwiceTheSameTask, "check_splits", "vault_6.*twice"),
    (toys.EmptySplit, "check_splits", "split 'test' has no task"),
    (toys.AnySplit, "check_splits", "unknown split must raise UnknownNameError"),
    (toys.FamilyOfAnything, "check_families", "unknown task returned 'written'"),
    (toys.SeedInThePrompt, "check_reset_repeats", "depend on the task id"),
    (toys.KeepsProgress, "check_reset_repeats", "You know"),
    (toys.KeepsProgressSilently, "check_seed", "Keep nothing over a reset"),
    (toys.SeedIgnored, "check_seed", "seed is ignored"),
    (toys.OwnChance, "check_seed", "self.np_random only"),
    (toys.HashOrder, "check_new_process", "order of a set"),
    (toys.HashOrderedCandidates, "check_new_process", "candidates"),
    (toys.HashOrderedTasks, "check_new_process", "tasks"),
    (toys.SharedState, "check_isolation", "keep it on the instance"),
    (toys.SharedCache, "check_isolation", "keep it on the instance"),
    (toys.GlobalRandom, "check_side_effects", "global random generator"),
    (toys.Prints, "check_side_effects", "it prints 'debug"),
    (toys.AnotherGameInWorkers, "check_vector", "AsyncVectorEnv returns"),
    (toys.SnapshotShares, "check_snapshot", "_get_state must return copies"),
    (toys.RestoreShares, "check_snapshot", "_set_state must copy"),
    (toys.SnapshotForgets, "check_snapshot", "everything that a later turn depends on"),
    (toys.UnseededChanceIsLost, "check_snapshot", "seed=None.*a later turn depends on"),
    (toys.SnapshotOfTuples, "check_snapshot", "no tuples"),
    (toys.RestoreNeedsAReset, "check_snapshot", "raised EnvironmentUsageError"),
    (toys.ForgetsTheEnd, "check_snapshot_of_the_end", "not over"),
    (toys.TakesAnySnapshot, "check_foreign_snapshot", "Other-v0.*is accepted"),
    (toys.ForgivesUnknownOptions, "check_foreign_snapshot", "no such option.*is accepted"),
    (toys.RestoresInPlace, "check_foreign_snapshot", "'turn': '3'.*changed the episode"),
    (toys.OwnReset, "check_prefix", "prefix_observations"),
    (toys.PrefixPastTheEnd, "check_prefix_refused", "is accepted"),
    (toys.PrefixDestroysTheEpisode, "check_prefix_refused", "changed the running episode"),
    (toys.NoFreshBudget, "check_turn_limit", "PrefixError.*raise max_turns"),
    (toys.OneTurnTooMany, "check_turn_limit", "truncated is"),
    (toys.TruncatesTheSolved, "check_turn_limit", "terminated, not truncated"),
    (toys.ForgivesUnknownTasks, "check_unknown_names", "no such task.*is accepted"),
    (toys.UnknownTaskHalfWay, "check_unknown_names", "before it changes anything"),
    (toys.UnknownTaskIsAKeyError, "check_unknown_names", "raised KeyError"),
    (toys.UnknownTaskNamesNothing, "check_unknown_names", "must name the valid ones"),
    (toys.PlaysOnAfterTheEnd, "check_misuse", "after the end is accepted"),
    (toys.StepsBeforeReset, "check_misuse", "step before reset is accepted"),
    (toys.OddTextRaises, "check_any_text", "_act must answer any text"),
    (toys.NumbersGrow, "check_any_text", "4300"),
    (toys.NarrowSpace, "check_any_text", "outside the observation space"),
    (toys.TrimsSurrogates, "check_any_text", "surrogates"),
    (toys.NumpyInInfo, "check_info", "cannot be written as JSON"),
    (toys.StealsSuccess, "check_info", "must be bool, got 'no'"),
    (toys.FieldsOfSets, "check_fields", "cannot be written as JSON"),
    (toys.NoFields, "check_fields", "found nothing"),
    (toys.FieldsAct, "check_fields", "changed the episode"),
    (toys.NoCategory, "check_failure_category", "None"),
    (toys.CategoryNeedsTurns, "check_failure_category", "raised IndexError"),
    (toys.LosingTeacher, "check_teacher", "does not solve"),
    (toys.WhimsicalTeacher, "check_teacher", "two ways"),
    (toys.OutOfReachForEver, "check_out_of_reach", "without a turn limit"),
    (toys.FreshWorldsEachTime, "check_generated_tasks", "gave other tasks"),
    (toys.SameWorldsForAllSeeds, "check_generated_tasks", "ignores its seed"),
    (toys.WorldsOfThisInstanceOnly, "check_generated_tasks", "raised UnknownNameError"),
    (toys.DialogueReadsBackSomethingElse, "check_dialogues", "the teacher meant"),
    (toys.DialogueWithoutAnswer, "check_dialogues", "no answer for the problem"),
    (toys.DialogueUnderAnotherName, "check_dialogues", "lists 'bare' as 'short'"),
    (toys.DialogueWithoutTokens, "check_dialogues", "max_tokens=0"),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("target", ["toys:Vault-v0", toys.Vault, toys.Bench, toys.NeverShut])
def test_a_good_environment_passes(check, target):
    check(target)


@pytest.mark.parametrize(
    ("target", "name", "message"), BROKEN, ids=[f"{toy.__name__}" for toy, *_ in BROKEN]
)
def test_a_broken_environment_is_caught(target, name, message):
    with pytest.raises(ConformanceError, match=f"(?s){target.__name__} breaks .*{message}"):
        getattr(conformance, name)(target)


def test_every_check_is_shown_to_fail():
    assert {name for _, name, _ in BROKEN} == {check.__name__ for check in CHECKS}


def test_all_failures_are_reported_at_once():
    with pytest.raises(ConformanceError) as caught:
        check_environment(toys.Prints)
    assert "it prints" in str(caught.value)
    check_environment(toys.Bench)


def test_environments_must_be_told_apart():
    check_told_apart([toys.Vault, toys.Bench])
    with pytest.raises(ConformanceError, match="share 'Vault-v0'"):
        check_told_apart([toys.Vault, toys.Prints])


def test_a_local_factory_cannot_be_checked_in_a_new_process():
    with pytest.raises(ConformanceError, match="top level of a module"):
        conformance.check_new_process(lambda: toys.Vault())


def test_a_target_must_be_a_text_environment():
    with pytest.raises(ConformanceError, match="derived from TextEnv"):
        conformance.check_gymnasium("CartPole-v1")
