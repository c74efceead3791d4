"""How much patience a peer meets that sends what it should not."""

from mlxd.scheduler.session import BAD_FRAME_BURST, DEAF_S, MAX_LOGIN_DELAY_S, Patience


def test_patience_ends_after_a_burst_and_comes_back_with_time() -> None:
    patience = Patience()
    answered = [patience.take_bad_frame(100.0) for _ in range(BAD_FRAME_BURST + 1)]
    assert answered == [True] * BAD_FRAME_BURST + [False]
    assert patience.deaf_until == 100.0 + DEAF_S
    assert patience.take_bad_frame(102.0)


def test_delays_of_wrong_credentials_double_up_to_a_limit() -> None:
    patience = Patience()
    delays = [patience.take_failed_login(0.0) for _ in range(20)]
    assert delays[:3] == [0.1, 0.2, 0.4]
    assert delays[-1] == MAX_LOGIN_DELAY_S
