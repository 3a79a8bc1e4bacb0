"""Ray: joining or starting it, places for processes, worker groups, and which error came first."""
