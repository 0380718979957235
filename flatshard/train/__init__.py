"""The trainer of language models behind ``flatshard train``, on local processes or under torchrun or srun."""
