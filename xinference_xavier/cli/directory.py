# SPDX-License-Identifier: Apache-2.0
"""The command that runs a directory for plain vLLM."""

from __future__ import annotations

import click

from xinference_xavier.cli import imported
from xinference_xavier.options import OptionError, listen_host


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=9990, show_default=True, help="0: any free."
)
def command(host: str, port: int) -> None:
    """Run the directory of replicas without Xinference.

    Its address is what the engines get as xavier_directory. Whoever reaches the port can run code
    in this process: keep it inside a trusted network.
    """
    try:
        host = listen_host(host, option="--host")
    except OptionError as error:
        raise click.UsageError(str(error)) from None
    runtime = imported("xinference_xavier.control.runtime")
    try:
        runtime.run_directory(host, port, lambda at: click.echo(f"Directory ready at {at}"))
    except OSError as error:
        raise click.ClickException(
            f"cannot listen on {host}:{port} ({error}); change --host or --port"
        ) from error
