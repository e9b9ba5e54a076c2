"""How tensors are computed: cache memory, attention kernels, matmul backends, recorded steps, timing."""
