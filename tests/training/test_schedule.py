"""Every learning rate, the end of a run and the switch of length, each against values worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.errors import UserError
from bertsmith.training.schedule import (
    PAPER_PHASES,
    Budget,
    LearningRateSchedule,
    LengthPhase,
    check_phases,
    phase_of,
)


def rates(schedule: LearningRateSchedule, first: int, last: int) -> list[tuple[int, float]]:
    """The (step, learning rate) list a loop would log from step `first` to `last`, both counted from 0."""
    return [
        (step, schedule.learning_rate(step, schedule.budget.progress(step, 0.0, 0.0))) for step in range(first, last)
    ]


def test_twenty_steps_with_a_warmup_of_five() -> None:
    schedule = LearningRateSchedule(peak=1.0, warmup=5, budget=Budget(steps=20))
    expected = [1 / 5, 2 / 5, 3 / 5, 4 / 5, 1.0, *((20 - k) / 15 for k in range(5, 20))]
    assert rates(schedule, 0, 20) == list(enumerate(expected))
    assert expected[5] == 1.0
    assert schedule.factor(20, 1.0) == 0.0


def test_the_decay_is_that_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = transformers.get_linear_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=20)
    theirs = []
    for _ in range(20):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
    ours = [rate for _, rate in rates(LearningRateSchedule(1.0, 5, Budget(steps=20)), 0, 20)]
    assert theirs[0] == 0.0  # the wasted first step, which ours does not have
    assert ours[:5] == pytest.approx(theirs[1:6])
    assert ours[5:] == pytest.approx(theirs[5:])


@pytest.mark.parametrize("stop", [5, 10, 15, 19])
def test_resuming_gives_the_same_list(stop: int) -> None:
    def schedule() -> LearningRateSchedule:
        return LearningRateSchedule(peak=3e-4, warmup=5, budget=Budget(steps=20))

    assert rates(schedule(), 0, stop) + rates(schedule(), stop, 20) == rates(schedule(), 0, 20)


def test_a_skipped_step_does_not_advance() -> None:
    schedule = LearningRateSchedule(peak=1.0, warmup=5, budget=Budget(steps=20))
    applied, taken = 0, []
    for attempt in range(21):
        rate = schedule.learning_rate(applied, schedule.budget.progress(applied, 0.0, 0.0))
        if attempt == 7:  # its gradient was NaN
            continue
        taken.append((applied, rate))
        applied += 1
    assert taken == rates(schedule, 0, 20)


def test_share_of_a_step_budget_is_rounded_to_steps() -> None:
    share = LearningRateSchedule(peak=1.0, warmup=0.25, budget=Budget(steps=20))
    assert rates(share, 0, 20) == rates(LearningRateSchedule(1.0, 5, Budget(steps=20)), 0, 20)
    tiny = LearningRateSchedule(peak=1.0, warmup=0.01, budget=Budget(steps=20))
    assert rates(tiny, 0, 2) == [(0, 1.0), (1, 1.0)]


def test_floor_and_constant() -> None:
    floored = LearningRateSchedule(peak=2.0, warmup=2, budget=Budget(steps=10), floor=0.1)
    assert floored.learning_rate(10, 1.0) == pytest.approx(0.2)
    assert floored.learning_rate(6, 0.6) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    constant = LearningRateSchedule(peak=2.0, warmup=2, budget=Budget(steps=10), decay="constant")
    assert [rate for _, rate in rates(constant, 0, 10)] == [1.0] + [2.0] * 9


def test_no_warmup() -> None:
    schedule = LearningRateSchedule(peak=1.0, warmup=0, budget=Budget(steps=4))
    assert [rate for _, rate in rates(schedule, 0, 4)] == [1.0, 0.75, 0.5, 0.25]
    minutes = LearningRateSchedule(peak=1.0, warmup=0, budget=Budget(minutes=1))
    assert minutes.factor(3, 0.5) == 0.5


def test_minutes_follow_the_clock() -> None:
    budget = Budget(minutes=10)
    share = LearningRateSchedule(peak=1.0, warmup=0.1, budget=budget)

    def at(step: int, seconds: float) -> float:
        return share.factor(step, budget.progress(step, 0.0, seconds))

    assert at(0, 0.0) == 0.01
    assert at(5, 30.0) == pytest.approx(0.5)
    assert at(10, 60.0) == pytest.approx(1.0)
    assert at(100, 330.0) == pytest.approx(0.5)
    assert at(1000, 600.0) == 0.0


@pytest.mark.parametrize("budget", [Budget(minutes=10), Budget(epochs=2.0)], ids=["minutes", "epochs"])
def test_warmup_in_steps_under_another_budget_equals_the_step_budget_at_an_even_pace(budget: Budget) -> None:
    schedule = LearningRateSchedule(peak=1.0, warmup=50, budget=budget)
    in_steps = LearningRateSchedule(peak=1.0, warmup=50, budget=Budget(steps=200))
    for step in range(200):
        progress = budget.progress(step, epochs=step * 2 / 200, seconds=step * 3.0)
        assert schedule.factor(step, progress) == pytest.approx(in_steps.factor(step, step / 200))


@given(
    steps=st.integers(1, 3000),
    share=st.floats(0, 0.999),
    floor=st.floats(0, 0.9),
    kind=st.sampled_from(["steps", "epochs", "minutes"]),
)
def test_every_step_learns_and_none_exceeds_the_peak(steps: int, share: float, floor: float, kind: str) -> None:
    budget = {"steps": Budget(steps=steps), "epochs": Budget(epochs=steps / 7), "minutes": Budget(minutes=0.5)}[kind]
    schedule = LearningRateSchedule(peak=1.0, warmup=share, budget=budget, floor=floor)
    factors = [schedule.factor(k, k / steps) for k in range(steps)]
    assert all(0 < factor <= 1 for factor in factors)
    top = factors.index(max(factors))
    assert factors[:top] == sorted(factors[:top])
    assert factors[top:] == sorted(factors[top:], reverse=True)


def test_budgets() -> None:
    assert Budget(steps=20).progress(5, 99.0, 99.0) == 0.25
    assert not Budget(steps=20).done(19, 99.0, 1e9)
    assert Budget(steps=20).done(20, 0.0, 0.0)
    assert Budget(epochs=2).progress(999, 0.5, 99.0) == 0.25
    assert Budget(epochs=2).done(0, 2.0, 0.0)
    assert Budget(minutes=2).progress(999, 0.5, 30.0) == 0.25
    assert not Budget(minutes=2).done(10**9, 10**9, 119.9)
    assert Budget(minutes=2).done(0, 0.0, 121.0)
    # a finished run that is given more goes on from where it stands
    assert not Budget(steps=30).done(20, 0.0, 0.0)
    assert [Budget(steps=2000).describe(), Budget(epochs=1).describe(), Budget(minutes=0.5).describe()] == [
        "2,000 steps",
        "1 epoch",
        "0.5 minutes",
    ]


@pytest.mark.parametrize(
    ("given_amounts", "named"),
    [
        ({}, "none of them"),
        ({"steps": 10, "minutes": 3.0}, "steps = 10 and minutes = 3.0"),
        ({"steps": 0}, "steps: 0"),
        ({"minutes": -1.0}, "minutes: -1.0"),
        ({"epochs": math.nan}, "epochs: nan"),
        ({"steps": 1.5}, "whole number"),
    ],
)
def test_wrong_budgets_are_named(given_amounts: dict, named: str) -> None:
    with pytest.raises(UserError, match=named):
        Budget(**given_amounts)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"peak": 0.0}, "learning rate: 0.0"),
        ({"peak": math.inf}, "learning rate: inf"),
        ({"warmup": -1}, "warm-up: -1"),
        ({"warmup": 2.5}, "warm-up: 2.5"),
        ({"warmup": 21}, "21 steps are longer than the whole run of 20"),
        ({"floor": 1.0}, "floor: 1.0"),
        ({"decay": "cosine"}, "decay: 'cosine'"),
    ],
)
def test_wrong_schedules_are_named(settings: dict, named: str) -> None:
    with pytest.raises(UserError, match=named):
        LearningRateSchedule(**{"peak": 1.0, "warmup": 5, "budget": Budget(steps=20), **settings})


@pytest.mark.parametrize("steps", [10, 20, 90, 1_000, 999_990])
def test_the_length_switches_at_an_exact_step(steps: int) -> None:
    switch = 9 * steps // 10
    budget = Budget(steps=steps)
    lengths = {k: PAPER_PHASES[phase_of(budget.progress(k, 0, 0), PAPER_PHASES)].max_length for k in range(steps)}
    assert [lengths[0], lengths[switch - 1], lengths[switch], lengths[steps - 1]] == [128, 128, 512, 512]
    assert sum(length == 512 for length in lengths.values()) == steps - switch


def test_phases_whose_shares_are_not_exact_in_binary() -> None:
    phases = [LengthPhase(0.1, 64), LengthPhase(0.2, 128), LengthPhase(0.7, 512)]
    assert 0.1 + 0.2 > 30 / 100  # the trap
    assert [phase_of(k / 100, phases) for k in (0, 9, 10, 29, 30, 99)] == [0, 0, 1, 1, 2, 2]
    assert phase_of(1.0, phases) == 2
    assert phase_of(0.99, [LengthPhase(1.0, 128)]) == 0


@pytest.mark.parametrize("shares", [[], [0.5, 0.4], [1.0, 0.5], [1.2, -0.2], [1.0, 0.0]])
def test_phases_must_add_up(shares: list[float]) -> None:
    with pytest.raises(UserError, match="phases"):
        check_phases([LengthPhase(share, 128) for share in shares])


def test_the_papers_phases_add_up() -> None:
    check_phases(PAPER_PHASES)
