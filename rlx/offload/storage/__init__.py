"""Host memory and files for offloaded bytes, and the copies between them and the device."""
