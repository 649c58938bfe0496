import logging

# where torchao is installed, transformers imports it, and it warns of kernels for other machines
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
