"""Lines of the server's log."""

import json
import logging

from fastpath.server.logs import fault


def test_a_fault_of_ours_is_a_line_without_its_message(caplog):
    with caplog.at_level(logging.ERROR, "twinpath.server"):
        try:
            try:
                raise KeyError("what somebody asked")
            except KeyError as cause:
                raise RuntimeError("what somebody asked, again") from cause
        except RuntimeError as error:
            fault(error)
    [line] = [record.getMessage() for record in caplog.records]
    said = json.loads(line)
    assert (said["fault"], said["of"]) == ("RuntimeError", "KeyError")
    assert [place.split(" ")[1] for place in said["at"]] == [
        "test_a_fault_of_ours_is_a_line_without_its_message"
    ]
    assert "somebody" not in line
