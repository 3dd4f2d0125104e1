"""Messages reach their address in the end, or are given up, whatever the service does; the caller never waits."""

import socket
import sys
import time

import pytest

from tamis.config import ConfigError
from tamis.run.notify import delivery
from tamis.run.notify.delivery import MOST_WAITING, Outbox, require_usable, send
from tamis.run.notify.messages import Message


def message(text: str = "hello", *, must_arrive: bool = False) -> Message:
    return Message("test", "artifacts/run", 7, text, "nothing", "now", loss=float("nan"), must_arrive=must_arrive)


def test_a_web_address_gets_json_with_user_and_password_as_a_header(receiving) -> None:
    receiver = receiving()
    assert send(f"http://ann:s%40cret@{receiver.place}/hook?token=t", message()) is None
    (payload,) = receiver.accepted
    assert payload["event"] == "test" and payload["run"] == "artifacts/run" and payload["step"] == 7
    assert payload["message"] == "hello" and payload["what_to_do"] == "nothing" and payload["loss"] is None
    assert receiver.headers[0]["Authorization"] == "Basic YW5uOnNAY3JldA=="


def test_a_service_that_fails_is_tried_again_and_the_problem_is_reported_once(receiving) -> None:
    receiver, reports = receiving(500, 429, 500), []
    outbox = Outbox(f"http://{receiver.place}/secret", reports.append)
    outbox.put(message("given up"))
    outbox.put(message("arrives"))
    assert receiver.until(1)[0]["message"] == "arrives"
    assert receiver.requests == 4 and reports == [f"http://{receiver.place}/…: it answered 500"]
    outbox.close()


def test_an_answer_that_will_not_change_is_not_asked_for_again(receiving) -> None:
    receiver, reports = receiving(404, 301), []
    outbox = Outbox(f"http://{receiver.place}/secret", reports.append)
    for text in ("refused", "redirected", "arrives"):
        outbox.put(message(text))
    assert [one["message"] for one in receiver.until(1)] == ["arrives"] and receiver.requests == 3
    outbox.close()


def test_a_service_that_never_answers_is_left_alone_and_the_end_does_not_wait_for_it(receiving, monkeypatch) -> None:
    monkeypatch.setattr(delivery, "TIMEOUT_S", 0.3)
    receiver, reports = receiving(*[0] * 99), []
    outbox = Outbox(f"http://{receiver.place}/secret", reports.append)
    outbox.put(message())
    outbox.close()
    outbox.join(0.01)
    assert not outbox.is_empty
    outbox.join(60)
    assert reports == [f"http://{receiver.place}/…: no answer within 0.3 s"] and receiver.requests == 1


def test_a_service_that_is_down_and_comes_back_gets_the_message(receiving, monkeypatch) -> None:
    monkeypatch.setattr(delivery, "BACK_OFF_S", (0.05,) * 1000)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    problem = send(f"http://127.0.0.1:{port}/secret", message())
    assert problem is not None and problem.text == "no connection (Connection refused)" and not problem.is_lasting
    receiver = receiving(503, 503)
    outbox = Outbox(f"http://{receiver.place}/", lambda _: None)
    outbox.put(message())
    assert len(receiver.until(1)) == 1
    outbox.close()


def test_at_the_end_the_newest_message_goes_first_and_old_ones_make_room(receiving, monkeypatch) -> None:
    receiver = receiving(0)
    outbox = Outbox(f"http://{receiver.place}/", lambda _: None)
    outbox.put(message("in progress"))
    while not receiver.requests:
        time.sleep(0.01)
    outbox.put(message("end", must_arrive=True))
    for number in range(MOST_WAITING + 5):
        outbox.put(message(str(number)))
    outbox.close()
    receiver.release.set()
    texts = [one["message"] for one in receiver.until(MOST_WAITING + 1)]
    newest_first = map(str, range(MOST_WAITING + 4, 5, -1))
    assert texts == ["in progress", *newest_first, "end"]


def test_other_schemes_go_through_apprise(receiving, capfd) -> None:
    pytest.importorskip("apprise")
    receiver = receiving(200, 500)
    address = f"json://ann:secret@{receiver.place}/hook"
    require_usable(address)
    assert send(address, message("by apprise")) is None
    assert "by apprise" in receiver.accepted[0]["message"]
    problem = send(address, message())
    assert problem is not None and problem.text == "the service did not accept the message"
    with pytest.raises(ConfigError, match=r"apprise does not accept nosuchservice://…"):
        require_usable("nosuchservice://secret")
    assert "secret" not in "".join(capfd.readouterr())


def test_without_apprise_the_error_names_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(ConfigError) as error:
        require_usable("slack://tokenA/tokenB")
    assert str(error.value) == "notify.to: slack://… needs the package apprise: pip install 'tamis[notify]'"
