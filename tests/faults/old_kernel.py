"""`python old_kernel.py COMMAND...` runs a command as on Linux before 5.14 and on gVisor.

Their madvise does not know MADV_POPULATE_READ and MADV_POPULATE_WRITE: a seccomp filter answers both with EINVAL.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_MADVISE = {"x86_64": 28, "aarch64": 233}
_POPULATE = (22, 23)
_NUMBER, _ADVICE = 0, 32  # offsets in struct seccomp_data: the call's number, and its third argument
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000


def forget_populate() -> None:
    """Have the kernel refuse both for this process and all that it starts."""
    steps = [
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_IF_EQUAL, 0, 4, _MADVISE[os.uname().machine]),
        (_LOAD, 0, 0, _ADVICE),
        (_JUMP_IF_EQUAL, 1, 0, _POPULATE[0]),
        (_JUMP_IF_EQUAL, 0, 1, _POPULATE[1]),
        (_RETURN, 0, 0, _FAIL | errno.EINVAL),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0)):
        if libc.prctl(*call):
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    forget_populate()
    os.execvp(sys.argv[1], sys.argv[1:])
