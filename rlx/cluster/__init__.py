"""Ray: joining or starting it, placement of processes, worker groups, and the first cause of errors."""
