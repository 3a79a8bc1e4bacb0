"""One FSDP training engine for every role: sharding, micro-batches, objectives, optimizer, checkpoints."""
