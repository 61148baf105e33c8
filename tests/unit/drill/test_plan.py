"""The kills of a drill: drawn from seed and number alone, and spread over what there is to kill."""

from collections import Counter

from pretrain.drill.watch import PHASES, plan_kill


def test_a_kill_is_a_function_of_seed_and_number():
    assert plan_kill(1, 7) == plan_kill(1, 7)
    assert plan_kill(1, 7) != plan_kill(1, 8)
    assert plan_kill(1, 7) != plan_kill(2, 7)


def test_the_target_does_not_move_the_moment():
    for number in range(50):
        rank, drawn = plan_kill(3, number), plan_kill(3, number, "any")
        assert (rank.phase, rank.moment, rank.jitter, rank.victim) == (
            drawn.phase,
            drawn.moment,
            drawn.jitter,
            drawn.victim,
        )


def test_kills_meet_every_phase_every_rank_and_every_target():
    kills = [plan_kill(0, number, "any") for number in range(500)]
    assert set(Counter(kill.phase for kill in kills)) == set(PHASES)
    assert min(Counter(kill.phase for kill in kills).values()) > 90
    assert min(Counter(kill.rank_of(4) for kill in kills).values()) > 90
    assert set(Counter(kill.target for kill in kills)) == {"rank", "launcher", "all"}
    assert all(0 <= kill.moment < 1 and 0 <= kill.jitter < 1 for kill in kills)


def test_a_kill_of_one_target_hits_nothing_else():
    assert {plan_kill(0, number, "launcher").target for number in range(20)} == {"launcher"}
    assert {plan_kill(0, number, "launcher").describe(2) for number in range(20)} == {"the launcher"}
    assert plan_kill(0, 0, "rank").describe(1) == "rank 0"
