"""Which runs of a server may still touch blocks."""

from __future__ import annotations

from kvdepot.client.servers import ServerRun, ServerRuns


class Life:
    """A LifeWatch of a server that ends when the test says so."""

    secret = b""

    def __init__(self) -> None:
        self.has_ended = False
        self.is_closed = False

    def is_gone(self) -> bool:
        return self.has_ended

    def close(self) -> None:
        self.is_closed = True


def make() -> tuple[ServerRuns, list[float]]:
    now = [0.0]
    return ServerRuns(lambda: now[0]), now


def test_a_former_server_holds_its_copies_until_it_is_gone() -> None:
    servers, _ = make()
    first, second = Life(), Life()
    servers.succeed(ServerRun(b"one", first), [])
    servers.succeed(ServerRun(b"two", second), [3, 7])
    assert servers.held_copies() == {3, 7} and servers.release_copies() == []
    servers.forget_current()
    assert second.is_closed and servers.may_touch_blocks() and servers.may_run()
    first.has_ended = True
    assert servers.release_copies() == [3, 7]
    assert first.is_closed and not servers.held_copies() and not servers.may_touch_blocks() and not servers.may_run()


def test_a_dead_servers_gpus_may_copy_for_a_moment() -> None:
    servers, now = make()
    life = Life()
    servers.linger_s = 1.0
    servers.succeed(ServerRun(b"one", life), [])
    life.has_ended = True
    assert not servers.may_run() and servers.may_touch_blocks()
    now[0] = 0.9
    assert servers.may_touch_blocks()
    now[0] = 1.0
    assert not servers.may_touch_blocks()
