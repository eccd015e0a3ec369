"""Who makes a step, and who is let in: against a table, and against a walk of many workers."""

from __future__ import annotations

import random

import pytest

from paradis.core.quorum import Choice, Quorum, Word, dropped, lateness, quorum_size


@pytest.mark.parametrize(
    ("workers", "backup", "size"), [(4, 1, 3), (4, 3, 1), (3, 3, 1), (2, 5, 1), (100, 4, 96)]
)
def test_all_but_the_backup_make_a_step_and_one_at_least(
    workers: int, backup: int, size: int
) -> None:
    assert quorum_size(workers, backup) == size


def test_the_first_step_is_everybodys() -> None:
    choice = Choice(2, 5)
    assert choice.choose(5, [0, 1], (0, 1, 2)) is None
    assert choice.choose(5, [2, 0, 1], (0, 1, 2)) == Word(5, (0, 1, 2), (0, 1, 2))


def begun(backup: int = 1) -> Choice:
    """Return the choice of three workers after their first step."""
    choice = Choice(backup, 0)
    choice.choose(0, [0, 1, 2], (0, 1, 2))
    choice.next_step(1)
    return choice


def test_the_first_who_commit_are_chosen_and_the_rest_hold_the_version() -> None:
    choice = begun()
    assert choice.choose(1, [2], (0, 1, 2)) is None
    assert choice.choose(1, [2, 0, 1], (0, 1, 2)) == Word(1, (0, 2), (0, 1, 2))
    assert choice.next_step(2) == {1: 1}, "who had committed and was not chosen is let in"
    assert choice.choose(2, [0, 1], (0, 1, 2)) == Word(2, (0, 1), (0, 1, 2))


def test_who_asks_gets_the_same_answer_again() -> None:
    choice = begun()
    word = choice.choose(1, [2, 0], (0, 1, 2))
    assert choice.asked(2, 1, 1) == word
    assert choice.asked(1, 1, 1) is None
    choice.next_step(2)
    assert choice.asked(1, 1, 2) == 2 and choice.asked(1, 1, 2) == 2
    assert choice.asked(0, 1, 2) == word, "it may have missed the word of the step before"
    choice.choose(2, [0, 2], (0, 1, 2))
    assert choice.asked(1, 1, 2) == 2, "the version is kept for it, though it is chosen for"


def test_who_is_late_by_many_steps_is_let_in_at_once_or_after_the_step() -> None:
    choice = begun()
    for step in range(1, 5):
        choice.choose(step, [0, 2], (0, 1, 2))
        choice.next_step(step + 1)
    assert choice.asked(1, 1, 5) == 5, "the present step is not chosen for"
    word = choice.choose(5, [0, 2], (0, 1, 2))
    assert word is not None and word.holders == (0, 1, 2)


def test_who_has_left_is_neither_counted_nor_waited_for() -> None:
    choice = begun()
    assert choice.choose(1, [0], (0, 2)) == Word(1, (0,), (0, 2))
    quorum = Quorum(None)
    quorum.told(Word(1, (0,), (0, 1, 2)))
    quorum.holds(0, 1)
    assert quorum.lacking(1, (0, 2)) == [2]


def test_a_word_is_believed_once() -> None:
    quorum = Quorum(None)
    assert quorum.told(Word(1, (0,), (0, 1))) and not quorum.told(Word(1, (1,), (0, 1)))
    assert quorum.made(1) == (0,) and quorum.made(2) == ()
    quorum.next_step()
    assert quorum.word is None and quorum.made(1) == (0,)


def test_steps_long_ago_are_forgotten() -> None:
    quorum = Quorum(None)
    for step in range(200):
        quorum.told(Word(step, (0,), (0,)))
        quorum.next_step()
    assert quorum.made(199) == (0,) and quorum.made(100) == ()


def test_a_checkpoint_is_of_a_version_that_is_not_chosen_for() -> None:
    choice = begun()
    assert choice.save("a", 1) == 1 and choice.save("a", 1) == 1
    word = choice.choose(1, [0, 2], (0, 1, 2))
    assert word is not None and word.saving == "a"
    assert choice.save("b", 1) == -1 and choice.save("a", 1) == 1
    choice.next_step(2)
    assert choice.save("b", 2) == 2


def test_late_contributions_are_counted() -> None:
    assert dropped([{0: 0}, {1: 3}, {2: 0}], (0, 2)) == 1
    assert "worker 3 was late in 2 of 9 steps" in lateness(2, 9, 3, 1)


@pytest.mark.parametrize("seed", range(30))
def test_nobody_is_left_behind(seed: int) -> None:
    """Workers commit in any order, repeat commits, and always come to the present step again."""
    source = random.Random(seed)
    workers = tuple(range(source.randint(2, 5)))
    choice = Choice(source.randint(1, len(workers) - 1), 0)
    at = dict.fromkeys(workers, 0)
    waiting: dict[int, int] = {}
    now, commits = 0, {}
    for _ in range(400):
        rank = source.choice(workers)
        waiting[rank] = at[rank]
        if at[rank] == now and choice.word is None:
            commits[rank] = None
        else:
            answer = choice.asked(rank, at[rank], now)
            if isinstance(answer, int):
                assert at[rank] < answer <= now
                at[rank] = answer
                del waiting[rank]
        if choice.word is None:
            choice.choose(now, commits, workers)
        word = choice.word
        if word is not None and all(at[r] == now for r in word.holders):
            now, commits = now + 1, {}
            for member in word.members:
                at[member] = now
                waiting.pop(member, None)
            for late, step in choice.next_step(now).items():
                assert step < now
                at[late] = now
                waiting.pop(late, None)
    assert now > 20
    assert max(now - step for step in at.values()) < now
