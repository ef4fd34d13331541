# SPDX-License-Identifier: Apache-2.0
"""The command that serves the console by itself."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING, Final

import click

from xinference_xavier.cli.output import api_key_option, endpoint_option
from xinference_xavier.rest import Api, ApiError

if TYPE_CHECKING:
    import gradio as gr

PORT: Final = 7860

TIMEOUT_S: Final = 10.0
"""Of a call of the server's API."""

LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


@click.command(
    epilog="Exit codes: 0 stopped; 1 it cannot listen there, or Gradio is not installed; 2 a wrong "
    "option."
)
@endpoint_option
@api_key_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=PORT,
    show_default=True,
    help="Port to listen on; 0: any that is free.",
)
def command(endpoint: str, api_key: str | None, host: str, port: int) -> None:
    """Serve the console of the server at --endpoint for the browser.

    Visitors without a token of their own use the one of --api-key, so with it only this host is
    listened to.
    """
    local = _is_loopback(host)
    if api_key and not local:
        raise click.BadParameter(
            f"{host} is reachable from elsewhere, and every visitor would have the rights of "
            "--api-key; leave the key out (the console then asks for one) or listen on 127.0.0.1",
            param_hint="--host",
        )
    try:
        Api(endpoint)
    except ApiError as error:
        raise click.BadParameter(str(error), param_hint="--endpoint") from None
    from xinference_xavier.cli import imported

    make_app = imported("xinference_xavier.ui.app").make_app
    # Both come with Gradio.
    import uvicorn
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    def connect(token: str, request: gr.Request) -> Api:
        return Api(endpoint, token or api_key, TIMEOUT_S)

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise click.ClickException(
            f"{host}:{port} cannot be used: {error.strerror}; choose another --host or --port"
        ) from None
    app = make_app(connect, server=endpoint)
    if local:
        # A page elsewhere whose name comes to mean this host must not get at --api-key.
        app = TrustedHostMiddleware(app, allowed_hosts=[host, *LOOPBACK])
    config = uvicorn.Config(app, host, port, lifespan="off", log_level="warning")
    name = f"[{host}]" if ":" in host else host
    click.echo(f"The console of {endpoint} is at http://{name}:{listener.getsockname()[1]}/")
    uvicorn.Server(config).run(sockets=[listener])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
