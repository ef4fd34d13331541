# SPDX-License-Identifier: Apache-2.0
"""A long run of random traffic, aborts and kills on real replicas, after which nothing has grown.

`workload` says what is asked, `client` asks it, `traffic` does so from many threads; `replicas`
runs, kills and restarts engines; `watch` takes samples of their processes and statuses; `judge`
decides on them; `run` brings all together, `report` shows it.
"""
