"""`serve` as a process: told to end, it ends what has begun."""

import json
import signal
import subprocess
import sys
import threading

import httpx
import pytest

from tests.server.test_openai import QUESTION

LONG = {"messages": QUESTION, "temperature": 0, "min_tokens": 1500, "max_tokens": 1500, "stream": True}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_answers_that_have_begun_are_ended_and_nothing_is_left(signum):
    command = [sys.executable, "-m", "fastpath.cli", "serve", "--port", "0", "--quiet"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            url = next(line for line in server.stderr if "listening on" in line).split()[-1]
            got, begun = [], threading.Event()

            def read():
                with httpx.stream("POST", f"{url}/v1/chat/completions", json=LONG, timeout=60) as answer:
                    for line in answer.iter_lines():
                        got.append(line)
                        begun.set()

            reader = threading.Thread(target=read)
            reader.start()
            assert begun.wait(30)
            server.send_signal(signum)
            reader.join(30)
            said = server.stderr.read()
            server.wait(30)
        finally:
            server.kill()
    assert got[-2] == "data: [DONE]", got[-5:]
    last = json.loads(got[-4].removeprefix("data: "))["choices"][0]
    assert last["finish_reason"] == "length"
    assert "Traceback" not in said, said
    assert server.returncode in (0, -signum, 128 + signum), (server.returncode, said)


def test_a_second_ctrl_c_ends_at_once_and_without_a_traceback():
    command = [sys.executable, "-m", "fastpath.cli", "serve", "--port", "0", "--quiet"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            url = next(line for line in server.stderr if "listening on" in line).split()[-1]
            endless = LONG | {"min_tokens": 4000, "max_tokens": 4000}
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=endless, timeout=60) as answer:
                next(answer.iter_lines())
                server.send_signal(signal.SIGINT)
                assert "Ctrl+C ends at once" in server.stderr.readline()
                server.send_signal(signal.SIGINT)
                said = server.stderr.read()
            server.wait(5)
        finally:
            server.kill()
    assert said == "twinpath: interrupted\n" and server.returncode == 130, said
