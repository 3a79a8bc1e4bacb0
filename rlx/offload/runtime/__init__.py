"""Options, the state that all layer calls of one handle share, and how the engine takes the place of a layer's forward."""
