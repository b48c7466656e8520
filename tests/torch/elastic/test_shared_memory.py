"""What one process has written, another one reads where it is, however often it moves; and nothing else."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest
import torch

from hpstage.torch.elastic.shared_memory import Memory, Reader

WRITER = """
import json, sys, torch
from hpstage.torch.elastic.shared_memory import Memory
memories = [Memory(), Memory()]
print(memories[0].sign(), flush=True)
for line in sys.stdin:
    which, size, value = json.loads(line)
    memories[which].take(size).fill_(value)
    print(json.dumps([memories[which].fd, memories[which].serial]), flush=True)
"""


@pytest.mark.ci
def test_a_process_reads_memory_that_another_process_writes_and_enlarges() -> None:
    drawn = random.Random(0)
    command = [sys.executable, "-c", WRITER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None and writer.stdout is not None
        reader = Reader(writer.stdout.readline())
        assert reader.can_read()
        for turn in range(60):
            size, value = drawn.randrange(1, 20 << drawn.randrange(turn // 6 + 1)), drawn.randrange(256)
            writer.stdin.write(json.dumps([turn % 2, size, value]) + "\n")
            writer.stdin.flush()
            found = reader.read(*json.loads(writer.stdout.readline()), size)
            assert found.tolist() == [value] * size
        writer.stdin.close()


def test_shared_memory_with_another_signature_is_not_read() -> None:
    memory, other = Memory(), Memory()
    signature = json.loads(memory.sign())
    other.sign()
    assert Reader(json.dumps(signature)).can_read()
    assert not Reader(json.dumps([signature[0], other.fd, signature[2]])).can_read()
    assert not Reader(json.dumps([signature[0], 10**6, signature[2]])).can_read()
    assert not Reader(json.dumps([2**22 + 1, *signature[1:]])).can_read()
    with open(os.devnull) as empty:
        assert not Reader(json.dumps([signature[0], empty.fileno(), signature[2]])).can_read()


def test_shared_memory_closed_by_its_owner_stays_readable_in_a_process_that_has_read_it() -> None:
    memory = Memory()
    reader = Reader(memory.sign())
    found = reader.read(memory.fd, memory.serial, 16)
    copy, fd = found.clone(), memory.fd
    memory.close()
    memory.close()
    assert memory.fd == -1 and not os.path.exists(f"/proc/self/fd/{fd}")
    assert torch.equal(found, copy)
