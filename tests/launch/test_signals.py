import os
import signal
import subprocess
import sys
import textwrap

import pytest

from launch.signals import SIGNALS, StopRequest


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_first_signal_only_sets_a_flag(number, exit_code, capfd):
    with StopRequest() as stop:
        assert not stop.is_requested
        assert stop.exit_code == 0
        signal.raise_signal(number)
        assert stop.is_requested
        assert stop.is_requested_anywhere()
    assert stop.exit_code == exit_code
    message = capfd.readouterr().err
    assert message.strip() == (
        f"{number.name}: stopping after this step, with a checkpoint. "
        "Once more to stop at once."
    )


def test_second_interrupt_raises_as_ever():
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert stop.exit_code == 130


def test_handlers_are_restored_with_and_without_a_signal():
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopRequest():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before
    with StopRequest():
        signal.raise_signal(signal.SIGTERM)
        assert [signal.getsignal(number) for number in SIGNALS] == before


def test_handlers_are_restored_after_an_error():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RuntimeError), StopRequest():
        raise RuntimeError
    assert signal.getsignal(signal.SIGINT) is before


def test_second_sigterm_ends_the_process():
    code = """
        import signal
        from launch.signals import StopRequest
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGTERM)
            print("alive", stop.is_requested, flush=True)
            signal.raise_signal(signal.SIGTERM)
            print("not reached", flush=True)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert result.stdout == "alive True\n"
    assert result.returncode == -signal.SIGTERM


def test_no_signal_means_no_request():
    with StopRequest() as stop:
        assert not stop.is_requested_anywhere()
    assert stop.exit_code == 0
