# SPDX-License-Identifier: Apache-2.0
"""A package, so that its server and its browser end with its last test."""
