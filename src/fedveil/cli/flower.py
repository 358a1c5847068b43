"""`fedveil flower-node`."""

from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from fedveil.cli.flags import Switch

APP = "ClientApp of this node as package.module:name; no other is run, whatever the SuperLink sends"
KEY = "file of the node's private key, for a SuperLink with registered keys"
CONFIG = "what only this node knows, as in 'partition-id=0 num-partitions=2', or a TOML file"
POLL = "seconds between looks for a message; longer when there was none for long"


def flower_node(
    app: Annotated[str, arg(metavar="APP", help=APP)],
    app_dir: Annotated[Path | None, arg(help="folder that holds the app's package, if it is not installed")] = None,
    superlink: Annotated[str, arg(help="SuperLink as host:port")] = "127.0.0.1:8000",
    root_certificates: Annotated[Path | None, arg(help="PEM file of the CA that signed the SuperLink's")] = None,
    insecure: Annotated[Switch, arg(help="connect without TLS")] = False,
    auth_supernode_private_key: Annotated[Path | None, arg(help=KEY)] = None,
    node_config: Annotated[str, arg(help=CONFIG)] = "",
    max_retries: Annotated[int | None, arg(help="tries in a row that may fail; by default any number")] = None,
    max_wait_time: Annotated[float | None, arg(help="seconds without a connection; by default any number")] = None,
    poll_interval: Annotated[float, arg(help=POLL)] = 0.3,
) -> None:
    """Run a node until Ctrl-C or SIGTERM."""
    import logging
    import signal
    import sys

    from fedveil.flower.node import NodeSettings, serve

    settings = NodeSettings(
        superlink,
        root_certificates,
        insecure,
        auth_supernode_private_key,
        node_config,
        max_retries,
        max_wait_time,
        poll_interval,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("fedveil")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    kept = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        serve(app, settings, app_dir)
    finally:
        signal.signal(signal.SIGTERM, kept)
        logger.removeHandler(handler)
        logger.setLevel(before)
