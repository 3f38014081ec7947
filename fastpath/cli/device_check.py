"""`device-check`: is what the GPU of this machine computes what the definitions say?"""

import argparse
import json
import sys

from fastpath.cli import output


def add_device_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE.json", help="all results; - is standard output")


def run_device_check(args: argparse.Namespace) -> int:
    """Every op once; 1 where one differs."""
    from fastpath.cuda import device

    if reason := device.missing():
        raise ValueError(f"device-check: {reason}. Run it on a machine with an NVIDIA GPU")
    from fastpath.bench.device import check

    results = check()
    bad = [result for result in results if not result["ok"]]
    for result in bad:
        print(f"{result['op']} {result['case']}: error {result['error']}", file=sys.stderr)
    print(f"{len(results) - len(bad)} of {len(results)} cases agree with their definitions")
    if args.out is not None:
        text = json.dumps({"device": device.describe(), "ops": results}, indent=1)
        with output.writing(args.out, [], what="the results") as stream:
            stream.write(text.encode())
    return 1 if bad else 0
