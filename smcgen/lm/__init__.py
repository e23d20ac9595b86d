import logging

# Where torchao is installed, transformers imports it, and it tells of kernels that it does not find and of deprecations.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
