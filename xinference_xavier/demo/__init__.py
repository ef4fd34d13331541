# SPDX-License-Identifier: Apache-2.0
"""``xinference-xavier demo``: two real vLLM replicas in a real Xinference share their KV cache.

``main`` is the command, ``server`` starts and ends Xinference, ``replicas`` asks questions and
looks at counters, ``story`` does the five parts, ``judge`` says whether each of them is so,
``answers`` compares answers, ``leftovers`` looks for what stayed behind, ``report`` shows it all.
"""
