"""Audits with a prefix cache and sessions: every owner has a name, a leak has none."""

from tests.proof.stateful.script import ALL, Play, script

T = list(range(1, 18))
OTHER = [70 + token for token in T]


@script(strategy=ALL, prefix=True)
def test_B74_slots_of_idle_sessions_are_owned_by_name(play: Play) -> None:
    """Prompts of sessions have one token, so that the states of their answers are in lanes."""
    first, second = play.open("a", ("b", 1))
    play.turn(OTHER[:9], first, prompt=1)
    play.turn([90, 91, 92], second, prompt=1)
    play.turn(T[:8], prompt=1)
    (row,) = play.admit(T)
    play.run(row, T[:9])
    play.audit()
    (turn,) = play.admit(OTHER, sessions=[first])
    play.audit()
    play.end(turn, row, how="release")
    play.close(first)
    play.audit()


@script(strategy=ALL[1:], prefix=True)
def test_M20_a_row_that_decodes_supersedes_the_last_state_that_it_left(play: Play) -> None:
    """The superseded state is evicted before older states of others, unless another request has gone on from it."""
    play.turn(OTHER[:8], prompt=1)  # this state is older than the states below
    (row,) = play.admit(T[:1])
    for length in (5, 9, 13):
        play.run(row, T[:length])
        play.publish(row)
        if length == 9:
            play.end(*play.admit([*T[:8], 60]), how="release")  # it goes on from the state of 8
    for _ in range(2):
        play.evict(states=1)
    play.match(OTHER)
    play.match(T)
    play.end(row)
    play.reached("evicted_states")
