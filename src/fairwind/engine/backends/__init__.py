"""How a stacked step is computed: eager, compiled, hand-written, recorded."""
