"""The commands that ask a running cluster, over HTTP: what each does; their flags are in `cluster/client_cli.py`."""
