# SPDX-License-Identifier: Apache-2.0
"""What a replica's own process needs: model classes, engine arguments, its cores, its group.

Xinference takes the last but one part of a model class's module path for the engine's name, so
this package must be called ``vllm``.
"""
