"""Runs one command and says what it took: python timed.py OUT.json COMMAND ...

A file of its own and quick to start, so that it can stand behind taskset, numactl and the like without their
time being counted. Memory is the largest resident size, pages of mapped files included.
"""

import json
import os
import sys
import time


def main(out: str, command: list[str]) -> int:
    begin = time.perf_counter()
    pid = os.posix_spawnp(command[0], command, os.environ)
    _, status, usage = os.wait4(pid, 0)
    seconds = time.perf_counter() - begin
    with open(out, "w") as file:
        json.dump({"seconds": seconds, "peak_bytes": usage.ru_maxrss * 1024}, file)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
