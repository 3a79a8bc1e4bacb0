"""Folders of tensors and JSON that can be believed: manifests with digests, safetensors, no pickle."""
