"""One thread, so that suites run side by side and bits do not depend on the machine's load; nothing is downloaded."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: its kernels run on CPU tensors
torch.set_num_threads(1)
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.load_profile("fixed")
