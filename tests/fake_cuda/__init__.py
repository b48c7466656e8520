"""A fake of CUDA, on which the real code trains with real values: two devices whose memory is that of the host.

Tensors on ``cuda:0`` and ``cuda:1`` are torch's own, with kernels of the CPU. Operations on tensors of several devices
are refused as CUDA refuses them; memory is counted, is limited and can run out at the n-th allocation; pinned memory is
real for torch. ``torch.cuda`` answers for these devices. torch looks for its devices once, when it is imported, so that
the fake is loaded before, into processes of its own: :mod:`tests.torch.test_fake_cuda` starts them.

What it does not show: the bits and the speed of a GPU's kernels; waits that are missing, since each operation ends
before the next begins (streams and events are accepted, and order nothing); random numbers of the device, which are
those of the CPU's generator; CUDA graphs, cuDNN, Triton, NCCL; the caching allocator, so that reserved memory is what
is allocated; more than one process on a device.
"""
