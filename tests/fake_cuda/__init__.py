"""A fake of CUDA, on which the real code trains with real values: two devices whose memory is that of the host.

Tensors on ``cuda:0`` and ``cuda:1`` are torch's own, with kernels of the CPU. Operations on tensors of several devices
are refused as CUDA refuses them; memory is counted, is limited and can run out at the n-th allocation; pinned memory is
real for torch. ``torch.cuda`` answers for these devices. torch looks for its devices once, when it is imported, so that
the fake is loaded before, into processes of its own: :mod:`tests.torch.test_fake_cuda` starts them.

A CUDA graph is faked by its operations: they run at no time but when it is replayed, on the tensors that it was
captured with, and count no version of them; what waits for the device fails while one is captured.

What cannot run here, or shows nothing:

- The bits and the speed of a GPU's kernels: cuBLAS, cuDNN, Triton, reduced precision, ``numerics="compiled"``.
- Waits that are missing, since each operation ends before the next begins. Streams and events are accepted, and order
  nothing; neither does a copy that does not block.
- Random numbers of the device, which are those of the CPU's generator: how a graph moves a generator on.
- CUDA graphs as such: what a driver refuses to capture, other threads while it captures, memory that graphs share and
  where it is freed, and torch's own, by which ``numerics="graphed"`` trains an ``update`` of the user's own.
- The caching allocator's blocks and their fragments: of what is freed, it counts the bytes until the cache is emptied.
- More than one process on a device (its memory is counted in each), MIG, NCCL, peer-to-peer copies, NVML.
"""
