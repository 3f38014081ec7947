"""The command line: `python -m fastpath.cli`, or `twinpath`. One file per family of subcommands."""
