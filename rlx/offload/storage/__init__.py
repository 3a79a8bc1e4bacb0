"""Host memory, files on disk, and the copies between them and the device."""
