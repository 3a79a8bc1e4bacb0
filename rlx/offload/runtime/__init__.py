"""Options, the session that all layer calls of one handle share, and the override of a layer's forward."""
