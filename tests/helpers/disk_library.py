"""The part of libaio that DeepSpeed uses, for machines that lack it: the kernel's system calls under libaio's names."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

HEADER = """
#pragma once
#include <linux/aio_abi.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <time.h>
#ifdef __cplusplus
extern "C" {
#endif
typedef aio_context_t io_context_t;
int io_queue_init(int depth, io_context_t* context);
int io_queue_release(io_context_t context);
int io_submit(io_context_t context, long count, struct iocb** blocks);
int io_pgetevents(io_context_t context, long least, long most, struct io_event* events, struct timespec* limit,
                  sigset_t* mask);
static inline void io_prep(struct iocb* block, int code, int file, void* buffer, size_t count, long long offset) {
    memset(block, 0, sizeof(*block));
    block->aio_fildes = file;
    block->aio_lio_opcode = code;
    block->aio_buf = (unsigned long)buffer;
    block->aio_nbytes = count;
    block->aio_offset = offset;
}
static inline void io_prep_pread(struct iocb* block, int file, void* buffer, size_t count, long long offset) {
    io_prep(block, IOCB_CMD_PREAD, file, buffer, count, offset);
}
static inline void io_prep_pwrite(struct iocb* block, int file, void* buffer, size_t count, long long offset) {
    io_prep(block, IOCB_CMD_PWRITE, file, buffer, count, offset);
}
#ifdef __cplusplus
}
#endif
"""
SOURCE = """
#define _GNU_SOURCE
#include "libaio.h"
#include <sys/syscall.h>
#include <unistd.h>
int io_queue_init(int depth, io_context_t* context) {
    *context = 0;
    return syscall(SYS_io_setup, depth, context);
}
int io_queue_release(io_context_t context) { return syscall(SYS_io_destroy, context); }
int io_submit(io_context_t context, long count, struct iocb** blocks) {
    return syscall(SYS_io_submit, context, count, blocks);
}
int io_pgetevents(io_context_t context, long least, long most, struct io_event* events, struct timespec* limit,
                  sigset_t* mask) {
    return syscall(SYS_io_getevents, context, least, most, events, limit);
}
"""


def disk_library(folder: Path) -> dict[str, str]:
    """Builds the library; returns the environment variables with which compilers and programs find it."""
    folder.mkdir()
    (folder / "libaio.h").write_text(HEADER)
    (folder / "aio.c").write_text(SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", f"{folder}/aio.c", "-o", f"{folder}/libaio.so"], check=True)
    inherited = os.environ.get("LD_LIBRARY_PATH", "")
    return {
        "CPATH": str(folder),
        "LIBRARY_PATH": str(folder),
        "LD_LIBRARY_PATH": f"{folder}:{inherited}" if inherited else str(folder),
    }
