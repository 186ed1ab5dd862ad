"""Pictures of a plan: one picture model (`grid`), drawn on a terminal, as SVG and as an HTML page."""
