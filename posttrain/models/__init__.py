import logging

# where torchao is installed, transformers imports it, and it tells of kernels for other machines
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
