"""One static HTML page of a run's transcripts and metrics: `python -m rlx.view RUN`."""
