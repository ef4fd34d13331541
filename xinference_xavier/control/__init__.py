# SPDX-License-Identifier: Apache-2.0
"""Membership, directory and leases across the replicas of one model.

* ``messages``: the plain data and the limits that the parts below agree on.
* ``directory`` / ``directory_actor``: who is there and who holds what; pure core, xoscar shell.
* ``peer``: the source's side of a lease, beside each scheduler side.
* ``mirror``: the local, lock-free copy of the directory that the engine thread reads.
* ``session`` / ``group`` / ``leases`` / ``breaker``: this replica's side of all that, on the
  control thread.
* ``runtime``: the facade that the scheduler side holds.
* ``client``: small helpers to reach a directory or a peer from anywhere.
"""
