"""`device-check`: is what the GPU of this machine computes right, and how fast is it?"""

import argparse
import json
import sys

from fastpath.cli import output
from fastpath.cli.arguments import real


def add_device_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE.json", help="all results; - is standard output")
    parser.add_argument(
        "--seconds", type=real(1), default=110.0, metavar="S",
        help="time for all parts together; what does not fit is named (default: 110)",
    )  # fmt: skip


def run_device_check(args: argparse.Namespace) -> int:
    """Ops and whole models against their definitions, rates against the card's; 1 where something differs."""
    from fastpath.cuda import device

    if reason := device.missing():
        raise ValueError(f"device-check: {reason}. Run it on a machine with an NVIDIA GPU")
    from fastpath.bench import device_report

    found = device_report.run(device_report.Budget(args.seconds))
    for result in found["ops"]:
        if not result["ok"]:
            print(f"{result['op']} {result['case']}: error {result['error']}", file=sys.stderr)
    print(device_report.text(found))
    if args.out is not None:
        with output.writing(args.out, [], what="the results") as stream:
            stream.write(json.dumps(found, indent=1).encode())
    return 0 if found["ok"] else 1
