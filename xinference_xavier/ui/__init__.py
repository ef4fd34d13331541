# SPDX-License-Identifier: Apache-2.0
"""The console: what the GPU-first models of a server do, in a browser.

It knows the server only through its HTTP API, with the rights of the visitor. Gradio is imported
by ``console`` alone: this module and ``extension.console`` work without it.
"""

from xinference_xavier.ui.serve import command

__all__ = ["command"]
