# SPDX-License-Identifier: Apache-2.0
"""Copies that bypass the CPU's caches, compiled when they are first used.

A block lies in one piece of some KiB per layer. memcpy, which numpy uses, writes pieces of that
size through the caches: each line of the target is read before it is overwritten, and displaces
one that the engine may still need. Non-temporal stores do neither. Nor does a piece cost a call
here, and the source's next page is asked for before the last one is done.

Non-temporal stores become visible in any order. So a copy begins and ends with a fence: nobody
sees a byte of it before what its caller wrote earlier, or after what its caller writes next. What
the generations of slots promise depends on both.

The code is made with llvmlite, which vLLM brings along (through Numba). Where that is missing, or
may not make code, the caller copies with numpy.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import platform
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

LINE: Final = 64
"""Bytes of a cache line. Addresses, distances and sizes must be multiples of it."""

_AHEAD: Final = 512
"""Bytes by which the source is asked for ahead: CPUs do that themselves, but not across pages."""

_VECTOR: Final = 32
"""Bytes per load and store; LLVM halves them for a CPU without AVX."""

_NAME: Final = "copy_pieces"

_Ints = npt.NDArray[np.int64]


class Pieces(NamedTuple):
    """``rows`` rows of pieces: piece ``p`` of row ``r`` lies at ``start + r * row + p * pitch``.

    ``start`` is an address; the distances are in bytes and may be negative.
    """

    start: int
    row: int
    pitch: int
    rows: int

    @property
    def aligned(self) -> bool:
        """Whether every piece begins with a cache line."""
        return not (self.start % LINE or self.row % LINE or self.pitch % LINE)


class Streamer:
    """The compiled copy. Callable from several threads at once; other threads run meanwhile."""

    def __init__(self, machine: Any) -> None:
        """Compile for a machine, see :func:`host_machine`. Raises what llvmlite raises."""
        import llvmlite.binding as llvm

        self._engine = llvm.create_mcjit_compiler(program(), machine)  # owns the code
        self._engine.finalize_object()
        side = (*[ctypes.c_int64] * 4, ctypes.c_char_p)
        function = ctypes.CFUNCTYPE(ctypes.c_int64, *side, *side, *[ctypes.c_int64] * 3)
        address = self._engine.get_function_address(_NAME)
        if not _executable(address):
            raise PermissionError("no memory of this process may hold code that it has made")
        self._copy = function(address)

    def copy(
        self,
        target: Pieces,
        targets: _Ints,
        source: Pieces,
        sources: _Ints,
        *,
        count: int,
        nbytes: int,
    ) -> None:
        """See :func:`stream`; what it cannot copy must not come here."""
        # As bytes: the address of an array's memory costs more than the copy of a short one.
        to, at = (np.asarray(rows, dtype=np.int64).tobytes() for rows in (targets, sources))
        if self._copy(*target, to, *source, at, len(targets), count, nbytes):
            raise IndexError(f"not all of {len(targets)} rows exist, from {source} to {target}")


def stream(
    target: Pieces,
    targets: _Ints,
    source: Pieces,
    sources: _Ints,
    *,
    count: int,
    nbytes: int,
) -> bool:
    """Copy ``count`` pieces of ``nbytes`` bytes of each row ``sources[i]`` to row ``targets[i]``.

    Returns False, and copies nothing, where pieces are not made of whole cache lines or there is no
    compiled copy. The caller keeps the memory. Raises before anything is written: IndexError for a
    row that does not exist, ValueError for lists of different lengths.
    """
    if len(targets) != len(sources):
        raise ValueError(f"{len(sources)} rows to {len(targets)}")
    if nbytes % LINE or not (target.aligned and source.aligned):
        return False
    compiled = streamer()
    if compiled is None:
        return False
    compiled.copy(target, targets, source, sources, count=count, nbytes=nbytes)
    return True


@functools.cache
def streamer() -> Streamer | None:
    """Return the copy for this CPU, compiled once per process; None where that cannot be done."""
    try:
        return Streamer(host_machine())
    except Exception as error:  # whatever is wrong with a library that we can do without
        logger.warning("Xavier copies with numpy, which is slower: %s", error)
        return None


def _executable(address: int) -> bool:
    """Whether code can run there. LLVM does not notice that the kernel refused it that."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, rights = line.split(maxsplit=2)[:2]
            first, end = (int(bound, 16) for bound in span.split("-"))
            if first <= address < end:
                return "x" in rights
    return False


def host_machine() -> Any:
    """Return what makes code for this CPU. Raises NotImplementedError for one without a fence."""
    if platform.machine() != "x86_64":  # LLVM would end the process
        raise NotImplementedError(f"not written for {platform.machine()}")
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=3)


def program() -> Any:
    """Return the copy as a module of LLVM. Its arguments are those of :meth:`Streamer.copy`."""
    import llvmlite.binding as llvm
    from llvmlite import ir

    word, pointer = ir.IntType(64), ir.IntType(8).as_pointer()
    module = ir.Module(_NAME)
    function = ir.Function(module, ir.FunctionType(word, [word] * 13), _NAME)
    target, source = function.args[:5], function.args[5:10]
    rows, count, nbytes = function.args[10:]
    fence = module.declare_intrinsic("llvm.x86.sse.sfence", fnty=ir.FunctionType(ir.VoidType(), []))
    number = ir.IntType(32)
    prefetch = module.declare_intrinsic(
        "llvm.prefetch", [pointer], ir.FunctionType(ir.VoidType(), [pointer, *[number] * 3])
    )
    read, unlike_others, data = number(0), number(0), number(1)
    passing = module.add_metadata([number(1)])
    vector = ir.VectorType(ir.IntType(8), _VECTOR)
    build = ir.IRBuilder(function.append_basic_block("entry"))

    @contextlib.contextmanager
    def steps(end: Any, step: int) -> Iterator[Any]:
        """Build a loop from 0 to before ``end``, a positive number."""
        before, body = build.block, build.append_basic_block()
        build.branch(body)
        build.position_at_end(body)
        at = build.phi(word)
        at.add_incoming(word(0), before)
        yield at
        following = build.add(at, word(step))
        at.add_incoming(following, build.block)
        after = build.append_basic_block()
        build.cbranch(build.icmp_signed("<", following, end), body, after)
        build.position_at_end(after)

    def index(side: Any, at: Any) -> Any:
        """Build the row number at a place of a list."""
        return build.load(build.gep(build.inttoptr(side[4], word.as_pointer()), [at]))

    def address(side: Any, at: Any, piece: Any) -> Any:
        """Build the address of a piece."""
        row = build.add(side[0], build.mul(index(side, at), side[1]))
        return build.add(row, build.mul(piece, side[2]))

    def stop_if(condition: Any) -> None:
        with build.if_then(condition, likely=False):
            build.ret(word(1))

    for number_of in (rows, count, nbytes):
        with build.if_then(build.icmp_signed("<=", number_of, word(0)), likely=False):
            build.ret(word(0))
    with steps(rows, 1) as at:
        for side in (target, source):
            stop_if(build.icmp_unsigned(">=", index(side, at), side[3]))
    build.call(fence, [])
    with steps(rows, 1) as at, steps(count, 1) as piece:
        to, from_ = address(target, at, piece), address(source, at, piece)
        with steps(nbytes, LINE) as offset:
            line = build.add(from_, offset)
            ahead = build.inttoptr(build.add(line, word(_AHEAD)), pointer)
            build.call(prefetch, [ahead, read, unlike_others, data])
            for part in range(0, LINE, _VECTOR):
                ours = build.inttoptr(build.add(line, word(part)), vector.as_pointer())
                place = build.add(build.add(to, offset), word(part))
                value = build.load(ours, align=_VECTOR)
                store = build.store(value, build.inttoptr(place, vector.as_pointer()), _VECTOR)
                store.set_metadata("nontemporal", passing)
    build.call(fence, [])
    build.ret(word(0))
    compiled = llvm.parse_assembly(str(module))
    compiled.verify()
    return compiled
