"""Who is named when a job stands still."""

import json
from dataclasses import asdict, replace

import pytest

from pretrain.run.heartbeat import MAX_VERDICT_CHARS, Beat, Standing, Verdict, limit_of
from pretrain.run.watchdog import describe_store, judge

WAITING = Beat(0, "n1", 100, 60, 41, 90, "update", 10, 9.0, 8.0, ["training/loop.py:72 train"])
HUNG = replace(WAITING, rank=1, host="n2", pid=200, marks=40, collectives=88, phase="data", stack=["a.py:1 read"])


def live(*beats: Beat) -> dict[int, Standing]:
    """Ranks whose last heartbeat was a moment ago."""
    return {beat.rank: Standing(beat, 0.4) for beat in beats}


def test_a_rank_without_a_heartbeat_is_frozen_or_gone_wherever_it_was():
    frozen = replace(WAITING, rank=1, host="n2", pid=200, for_s=0.2)
    verdict = judge(WAITING, {1: Standing(frozen, 5.0), 2: Standing(replace(WAITING, rank=2), 0.4)}, 3)
    assert verdict.culprits == (1,)
    assert verdict.exit_code == 76
    first, stack = verdict.text.splitlines()
    assert first == (
        "rank 1 (n2, process 200) is frozen or gone: no heartbeat for 5 s (its process was stopped or killed, or its "
        "host is dead); it was last seen in update of step 10 for 0 s, at:"
    )
    assert stack == "    training/loop.py:72 train"


def test_those_behind_hang_and_those_that_wait_for_them_are_not_named():
    verdict = judge(WAITING, live(HUNG, replace(WAITING, rank=2)), 3)
    assert verdict.culprits == (1,)
    assert verdict.text == (
        "rank 1 (n2, process 200) hangs: in data of step 10 for 9 s (limit 8 s), while 2 ranks wait for it, at:\n"
        "    a.py:1 read"
    )


def test_the_hung_rank_comes_to_the_same_verdict_itself():
    assert judge(HUNG, live(WAITING), 2) == judge(WAITING, live(HUNG), 2)


def test_within_a_phase_the_one_with_fewer_collectives_is_behind():
    hung = replace(WAITING, rank=1, collectives=89)
    assert judge(WAITING, live(hung), 2).culprits == (1,)
    assert judge(hung, live(WAITING), 2).culprits == (1,)


def test_a_rank_whose_phase_may_take_longer_is_waited_for():
    saving = replace(HUNG, phase="save", limit_s=24.0)
    assert judge(WAITING, live(saving), 2) is None
    assert judge(WAITING, live(replace(saving, for_s=24.5)), 2).culprits == (1,)


def test_where_all_stand_at_the_same_place_nobody_is_named():
    verdict = judge(WAITING, live(replace(WAITING, rank=1)), 2)
    assert verdict.culprits == ()
    assert verdict.text.startswith("all 2 ranks stand still at the same place: none can be named")
    assert verdict.text.count("training/loop.py:72") == 2


@pytest.mark.parametrize(
    "importing", [{"phase": "import"}, {"stack": ["<frozen importlib._bootstrap>:241 _call_with_frames_removed"]}]
)
def test_packages_that_are_slow_to_import_are_not_taken_for_the_network(importing):
    one = replace(WAITING, **importing)
    verdict = judge(one, live(replace(one, rank=1)), 2)
    assert verdict.text.startswith(
        "all 2 ranks stand still at the same place: none can be named; they import Python packages: the disk with"
    )
    assert "network" not in verdict.text
    assert "the network may be down" in judge(one, live(replace(WAITING, rank=1)), 2).text
    assert limit_of("import", 10.0) == 30.0


def test_a_single_process_that_hangs_is_named():
    assert judge(WAITING, {}, 1).text.startswith(
        "rank 0 (n1, process 100) hangs: in update of step 10 for 9 s (limit 8 s)"
    )


def test_ranks_that_never_came_up_are_listed_and_are_no_hang():
    verdict = judge(replace(WAITING, phase="meet", step=0), live(HUNG), 4)
    assert verdict.exit_code == 69
    assert verdict.culprits == (2, 3)
    assert verdict.text.startswith("ranks 2, 3 never came up; rank 0 (n1, process 100) has been waiting in meet")


def test_a_rank_that_never_sent_a_heartbeat_is_gone_once_the_job_runs():
    verdict = judge(WAITING, {}, 2)
    assert (verdict.exit_code, verdict.culprits) == (76, (1,))
    assert verdict.text == "rank 1 is frozen or gone: no heartbeat has ever come from there"


def test_a_store_that_does_not_answer_is_its_keepers_trouble():
    assert describe_store("n1:29500", WAITING, 6.0).startswith(
        "rank 0 (n1, process 100) is frozen or gone: no heartbeat"
    )
    gone = describe_store("n1:29500", WAITING, None)
    assert gone.startswith(
        "rank 0 (n1, process 100) is gone: the store of the job, which it keeps at n1:29500, has closed"
    )
    nobody = "who keeps it is frozen, gone, or unreachable"
    assert describe_store("n1:29500", None, 6.0) == (
        f"the store of the job at n1:29500 has not answered for 6 s: {nobody}"
    )
    assert describe_store("n1:29500", None, None) == f"the store of the job at n1:29500 has closed: {nobody}"


def test_a_verdict_travels_as_json():
    verdict = Verdict("it hangs", 76, (1, 2))
    assert Verdict.from_json(json.dumps(asdict(verdict))) == verdict


@pytest.mark.parametrize(
    "verdict", [Verdict("disk full", 74, (1,)), Verdict("a bug", 70), judge(WAITING, live(HUNG), 2)]
)
def test_a_verdict_of_a_rank_comes_through_the_store_as_it_is(verdict):
    assert Verdict.from_json(json.dumps(asdict(verdict))) == verdict


@pytest.mark.parametrize("code", [0, 1, 75, 137, -9, 76.5, "76", None, [], True])
def test_no_verdict_ends_a_run_as_done_or_as_stopped(code):
    forged = {"text": "well done", "exit_code": code, "culprits": []}
    assert Verdict.from_json(json.dumps(forged)) == Verdict("well done", 76, ())


def test_the_text_of_a_verdict_has_no_terminal_controls_and_an_end():
    forged = {"text": "\x1b]0;PWN\x07a\r\nb\u202e" + "c" * 10**6, "exit_code": 65, "culprits": []}
    text = Verdict.from_json(json.dumps(forged)).text
    assert text.startswith("]0;PWNa\nbccc")
    assert len(text) <= MAX_VERDICT_CHARS


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\xff", b"[]", b"{}", b"1", b"[" * 10**5),
        *(b'{"text": "", "exit_code": 76, "culprits": [%s]}' % one for one in (b'"x"', b"1e400", b"NaN")),
    ],
)
def test_a_verdict_that_no_rank_has_written_is_a_failure(content):
    verdict = Verdict.from_json(content)
    assert verdict.exit_code == 76 and "cannot be read: no rank has written it" in verdict.text


@pytest.mark.parametrize("wrong", [[{}], None, True, {}])
def test_a_heartbeat_that_no_rank_has_written_is_none(wrong):
    values = asdict(HUNG)
    assert Beat.from_json(json.dumps(values)) == HUNG
    without = {name: value for name, value in values.items() if name != "pid"}
    forged = [wrong, without, {**values, "more": 1}, *({**values, name: wrong} for name in values)]
    assert [Beat.from_json(json.dumps(one)) for one in forged] == [None] * len(forged)
    assert [Beat.from_json(text) for text in ("", "[" * 10**5)] == [None, None]
