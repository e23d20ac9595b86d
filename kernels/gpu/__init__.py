"""The Triton kernels behind the functions of `smcgen.kernels`, one file each. A function imports its file when its tensors lie
on a CUDA device; with TRITON_INTERPRET=1 set before Triton is imported, the same launchers take CPU tensors (for tests).

Nothing here waits for the device, and grids and shapes depend on shapes only: a captured CUDA graph can hold every launch.
"""
